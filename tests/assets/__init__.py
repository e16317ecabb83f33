"""Models that tests train for themselves."""
