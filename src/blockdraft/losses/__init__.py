"""Objectives: from hidden states of block slots and target tokens to a loss."""
