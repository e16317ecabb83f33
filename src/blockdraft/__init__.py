"""blockdraft: train, prove, export and serve block-diffusion draft models for speculative decoding.

Importing the package is cheap on purpose: torch and transformers are imported by the modules that compute.
"""

import logging

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())  # a library is silent until its user wants to hear it
