"""The reference engine: speculative decoding that a reader can check, and exact acceptance without decoding."""
