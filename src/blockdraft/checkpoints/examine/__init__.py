"""Contradictions in a checkpoint: what its files state, and the checks that compare it."""
