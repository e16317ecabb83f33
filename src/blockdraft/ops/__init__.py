"""Functions on tensors: they know nothing of models, files or settings."""
