"""blockdraft: train, prove, export and serve block-diffusion draft models for speculative decoding.

Importing the package is cheap on purpose: torch and transformers are imported by the modules that compute.
"""

__version__ = "0.1.0"
