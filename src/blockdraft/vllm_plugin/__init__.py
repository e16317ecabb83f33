"""What runs inside vLLM, found through the entry point `vllm.general_plugins`, and what is known of that engine."""
