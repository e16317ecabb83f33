"""Is what we compute with a verifier what the verifier computes?

The reference is the model's own forward with its *eager* attention: the plain formula of the family, which drops
nothing (its other attention functions may). It is compared with our whole pass, our cached steps over ragged rows and
our taps, on a text that is longer than every window: windows are shortened while the proof runs, in the config that
both read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockdraft.errors import InputError
from blockdraft.verifiers.base import Sources, Verifier

LENGTH = 40  # tokens of a proof's texts
WINDOW = 12  # what longer windows are shortened to: such a text passes them three times
# Cached steps: how many tokens are run, and how many of them each of the two rows keeps, so that lengths differ.
STEPS = ((22, (17, 22)), (6, (6, 3)), (6, (0, 0)))
EXACT, HALF = 1e-3, 0.2  # largest errors allowed, in standard deviations of what is compared


@dataclass(frozen=True, slots=True)
class OwnForward:
    """What the model itself says of two texts.

    Attributes:
        logits: float32 [2, LENGTH, V].
        taps: the stream that enters each of the n layers, [2, LENGTH, n, E].
    """

    logits: Tensor
    taps: Tensor


def own_forward(logits: Tensor, hidden_states: Sequence[Tensor] | None, num_layers: int) -> OwnForward:
    """A model's output. transformers' last hidden state has gone through the final norm and is no tap.

    Raises:
        NotImplementedError: it does not report one hidden state for each layer, or more than one for a position.
    """
    if hidden_states is None or len(hidden_states) != num_layers + 1:
        raise NotImplementedError("it does not report one hidden state for each layer")
    if hidden_states[0].ndim != 3:
        raise NotImplementedError("its layers have several hidden states for a position")
    return OwnForward(logits.float(), torch.stack(list(hidden_states[:num_layers]), dim=-2))


def proof_tokens(config: Any, vocab_size: int, num_rows: int) -> Tensor:
    """Random token ids [num_rows, LENGTH], none of which stands for padding, an image or the like."""
    named = [value for key, value in config.to_dict().items() if key.endswith(("_token_id", "_token_index"))]
    special = {token for value in named for token in (value if isinstance(value, (list, tuple)) else [value])}
    ordinary = torch.tensor([token for token in range(min(vocab_size, 1000)) if token not in special])
    generator = torch.Generator().manual_seed(0)
    return ordinary[torch.randint(len(ordinary), (num_rows, LENGTH), generator=generator)]


@contextlib.contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """The family's own plain attention while the body runs."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextlib.contextmanager
def short_windows(*configs: Any) -> Iterator[None]:
    """Windows that a proof's text passes, while the body runs."""
    long = [
        (config, config.sliding_window) for config in configs if (getattr(config, "sliding_window", None) or 0) > WINDOW
    ]
    for config, _ in long:
        config.sliding_window = WINDOW
    try:
        yield
    finally:
        for config, window in long:
            config.sliding_window = window


@torch.no_grad()
def prove(verifier: Verifier, own: OwnForward, tokens_RT: Tensor, sources: Sources = ()) -> None:
    """Compare a verifier with its model's own forward over the same texts.

    Raises:
        InputError: they differ by more than rounding; the family does something that is not understood.
    """
    num_layers = verifier.identity.num_layers
    target_layer_ids = range(num_layers)
    for row, states in enumerate(verifier.states(list(tokens_RT), range(num_layers + 1), sources)):
        taps, logits = states.taps[:, :num_layers], verifier.logits(states.final)
        _require_equal(verifier, "in one pass", taps, own.taps[row], logits, own.logits[row])
        # Trainers that have no layers are given the last tap and make of it what the head reads.
        again = verifier.logits(verifier.normed(states.taps[:, num_layers]))
        _require_equal(verifier, "behind the final norm", taps, own.taps[row], again, own.logits[row])
    cache, starts = verifier.cache(len(tokens_RT), sources), [0] * len(tokens_RT)
    for width, kept in STEPS:
        parts = [slice(start, start + width) for start in starts]
        step = torch.stack([row[part] for row, part in zip(tokens_RT, parts, strict=True)])
        found = verifier.extend(cache, step, target_layer_ids)
        for row, part in enumerate(parts):
            logits = verifier.logits(found.final[row])
            _require_equal(
                verifier, "in cached steps", found.taps[row], own.taps[row, part], logits, own.logits[row, part]
            )
        cache.kv.commit(torch.tensor(kept, device=tokens_RT.device))
        starts = [start + count for start, count in zip(starts, kept, strict=True)]


def _require_equal(
    verifier: Verifier, where: str, taps_TLE: Tensor, own_TLE: Tensor, logits_TV: Tensor, own_TV: Tensor
) -> None:
    pairs = [("logits", logits_TV, own_TV)]
    pairs += [
        (f"hidden states after {tap} layers", taps_TLE[:, tap], own_TLE[:, tap]) for tap in range(own_TLE.shape[1])
    ]
    for what, found, wanted in pairs:
        error, bound = difference(found, wanted, verifier.dtype), EXACT if verifier.dtype == torch.float32 else HALF
        if not error <= bound:  # also where it is not a number
            raise InputError(
                "verifier",
                verifier.identity.name,
                f"{verifier.identity.architecture} is not supported: {what} {where} differ from the model's own by "
                f"{error:.2g} of their spread (allowed {bound:.2g})",
            )


@torch.no_grad()
def difference(found_TX: Tensor, wanted_TX: Tensor, dtype: torch.dtype) -> float:
    """How far two sets of vectors are apart, in standard deviations of the wanted ones.

    In float32 the worst position counts. In half precision it is the median: a mixture of experts may send a token
    elsewhere because of rounding, while what differs in kind (a window, a position, a scale) differs nearly everywhere.
    """
    wanted = wanted_TX.float()
    by_position = (found_TX.float() - wanted).square().mean(dim=-1).sqrt() / wanted.std()
    return float(by_position.max() if dtype == torch.float32 else by_position.median())
