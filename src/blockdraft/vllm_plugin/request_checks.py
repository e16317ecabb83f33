"""What vLLM 0.32 answers with 500, or with a dead engine, and should with 400: patched in the server's process.

Each is an error of the engine's own. Tests in tests/serving/test_plugin.py fail when it has fixed them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any


def patch_requests(v1_runner: bool) -> None:
    """Reject bodies that vLLM's own checks of a request trip over, and what its V1 runner cannot do with a draft."""
    import vllm

    _patch_bodies()
    if v1_runner:
        parameters: Any = vllm.SamplingParams
        parameters._validate_spec_decode = with_draft_checks(parameters._validate_spec_decode)


def _patch_bodies() -> None:
    try:
        from fastapi._compat import v2
    except ImportError:  # an engine without a server, or another FastAPI: its own answers stay
        return
    field: Any = v2.ModelField
    field.validate = without_accidents(field.validate)


def without_accidents(stock: Callable[..., Any]) -> Callable[..., Any]:
    """FastAPI's check of a body against the request's type, which some bodies leave by an exception.

    vLLM's validators call methods of what a client sent, whatever its type is (`{"structured_outputs": [1]}`), its
    tokenizer cannot read half of a surrogate pair, what it sends to the engine has room for 64 bits a number, and its
    beam search divides by a power of the length. All are the client's mistakes.
    """

    def validate(field: Any, value: Any, *args: Any, loc: tuple[Any, ...] = (), **kwargs: Any) -> Any:
        try:
            if isinstance(value, dict):
                json.dumps(value, ensure_ascii=False, default=str).encode()
                _require_numbers_that_travel(value)
            return stock(field, value, *args, loc=loc, **kwargs)
        except _NumberError as error:
            said = str(error)
        except UnicodeEncodeError:
            said = "the body holds half of a surrogate pair, which is no text"
        except (AttributeError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
            said = f"the body has a field of the wrong type ({error})"
        return None, [{"type": "value_error", "loc": loc, "msg": said, "input": None}]

    return validate


class _NumberError(Exception):
    pass


def _require_numbers_that_travel(value: Any) -> None:
    """Reject whole numbers beyond 64 bits, infinities and NaN, anywhere in a body: JSON has none of the latter."""
    if isinstance(value, dict):
        for each in value.values():
            _require_numbers_that_travel(each)
    elif isinstance(value, list):
        for each in value:
            _require_numbers_that_travel(each)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise _NumberError("the body has a whole number of more than 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise _NumberError(f"the body has {value}, which is no number")


def with_draft_checks(stock: Callable[..., None]) -> Callable[..., None]:
    """The engine's check of sampling parameters beside a draft, which leaves one out.

    Its rejection sampler returns no log probabilities of chosen tokens, and the server looks for them.
    """

    def validate(parameters: Any, speculative_config: Any) -> None:
        stock(parameters, speculative_config)
        if speculative_config is not None and parameters.logprob_token_ids is not None:
            from vllm.exceptions import VLLMValidationError  # any other error is a 500

            raise VLLMValidationError("logprob_token_ids is not supported with speculative decoding")

    return validate
