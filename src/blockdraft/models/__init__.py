"""The draft model: one class, whose variants are settings."""
