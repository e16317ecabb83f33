"""Checkpoints: the Speculators format plus the contract."""
