"""blockdraft: train, prove, export and serve block-diffusion draft models for speculative decoding.

    import blockdraft
    pair = blockdraft.load_draft("runs/draft/checkpoint_best")

Importing the package is cheap on purpose: what it offers is imported when it is first asked for, and torch and
transformers by the modules that compute.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from blockdraft.version import __version__ as __version__

if TYPE_CHECKING:  # the same names as in _HOME, for type checkers and editors
    from blockdraft import errors
    from blockdraft.api import Evaluation, evaluate, load_draft, load_verifier, train
    from blockdraft.decoding.engine import DecodingEngine, Reply
    from blockdraft.errors import BlockdraftError, InputError, StoppedError
    from blockdraft.pipeline.loading import Pair
    from blockdraft.settings import (
        CheckpointSettings,
        EvaluateSettings,
        SamplingSettings,
        TrainSettings,
        VerifierSettings,
    )
    from blockdraft.training.history import Summary


_HOME = {
    "errors": "errors",
    **dict.fromkeys(("Evaluation", "evaluate", "load_draft", "load_verifier", "train"), "api"),
    **dict.fromkeys(("DecodingEngine", "Reply"), "decoding.engine"),
    **dict.fromkeys(("BlockdraftError", "InputError", "StoppedError"), "errors"),
    "Pair": "pipeline.loading",
    **dict.fromkeys(
        ("CheckpointSettings", "EvaluateSettings", "SamplingSettings", "TrainSettings", "VerifierSettings"), "settings"
    ),
    "Summary": "training.history",
}
__all__ = [
    "BlockdraftError",
    "CheckpointSettings",
    "DecodingEngine",
    "EvaluateSettings",
    "Evaluation",
    "InputError",
    "Pair",
    "Reply",
    "SamplingSettings",
    "StoppedError",
    "Summary",
    "TrainSettings",
    "VerifierSettings",
    "errors",
    "evaluate",
    "load_draft",
    "load_verifier",
    "train",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())  # a library is silent until its user wants to hear it


def __getattr__(name: str) -> Any:
    """What the package offers, imported when it is first asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_HOME[name]}")
    found = globals()[name] = module if name == _HOME[name] else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
