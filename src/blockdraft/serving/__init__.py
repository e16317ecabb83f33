"""Talking to vLLM: the launcher, a client, and the proof that served drafts are the trained ones."""
