"""T5Gemma 2, text only, as a model of vLLM 0.32 (V1 runner)."""
