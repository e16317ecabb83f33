"""Serving with vLLM: the plugin, the launcher, a client, and the proof that served drafts are the trained ones."""
