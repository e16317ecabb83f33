"""Prompts, the verifier's own replies to them, and packed rows for training."""
