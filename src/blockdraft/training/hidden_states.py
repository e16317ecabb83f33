"""Hidden states for training: where they come from, and which of them stay in memory between epochs.

A provider gives the states of examples. The one here runs the verifier in this process; `engine_states` has the one
that asks running servers, `hidden_state_files` the one that keeps on disk what either of them makes. Examples are run
in fixed groups before training until the memory allowance is used up; what does not fit is asked for anew with each
packed row. Either way an example's states do not depend on where training stands, so that a resumed run sees the same
bits.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blockdraft.progress import progress
from blockdraft.records import Example
from blockdraft.verifiers.base import TrainingVerifier, whole

GROUP = 16  # examples run together
SINK_POSITIONS = 4  # first positions of a text, whose states are outliers and are kept out of statistics


@dataclass(frozen=True, slots=True)
class ExampleStates:
    """What the verifier says about an example.

    Attributes:
        taps: [T, L, E], in the verifier's dtype.
        greedy: the verifier's own next token after each position, int64 [T]; filled from the token before
            the first target on, before that it is -1 and never read.
        final: states after the final norm, [T, E], where an objective needs the verifier's distributions; else None.
    """

    taps: Tensor
    greedy: Tensor
    final: Tensor | None = None


class HiddenStateProvider(Protocol):
    """Gives the states of examples."""

    bytes_per_token: int
    """What a token's states take in memory."""
    reads_ahead: bool
    """Whether asking ahead of the step saves time: where other machines or processes make the states."""

    def available(self, examples: Sequence[Example]) -> Sequence[Example]:
        """The examples that can be trained on; asked once, before anything else."""
        ...

    def prepare(self, examples: Sequence[Example]) -> None:
        """Do what is better done once, before training, than with every row."""
        ...

    def get(self, examples: Sequence[Example]) -> list[ExampleStates]:
        """The states of these examples, on the verifier's device."""
        ...

    def close(self) -> None:
        """Nothing more will be asked for."""
        ...


class HiddenStateMaker(HiddenStateProvider, Protocol):
    """A provider that makes states anew, of whatever taps."""

    verifier: TrainingVerifier
    target_layer_ids: tuple[int, ...]
    with_final: bool

    def giving(self, target_layer_ids: Sequence[int], with_final: bool) -> HiddenStateMaker:
        """A maker of the same states with other taps."""
        ...


class InProcess:
    """A provider that runs the verifier in this process whenever it is asked.

    Args:
        with_final: give the states after the final norm, too.
    """

    reads_ahead = False

    def __init__(self, verifier: TrainingVerifier, target_layer_ids: Sequence[int], with_final: bool = False) -> None:
        self.verifier, self.target_layer_ids, self.with_final = verifier, tuple(target_layer_ids), with_final
        kept = len(self.target_layer_ids) + with_final
        self.bytes_per_token = kept * verifier.identity.hidden_size * verifier.dtype.itemsize + 8

    def giving(self, target_layer_ids: Sequence[int], with_final: bool) -> InProcess:
        return InProcess(self.verifier, target_layer_ids, with_final)

    def available(self, examples: Sequence[Example]) -> Sequence[Example]:
        return examples

    def prepare(self, examples: Sequence[Example]) -> None:
        pass

    def close(self) -> None:
        pass

    def get(self, examples: Sequence[Example]) -> list[ExampleStates]:
        if not examples:
            return []
        sequences = [torch.tensor(example.input_ids) for example in examples]
        sources = [example.source_ids for example in examples]
        results = []
        found = whole(self.verifier).states(sequences, self.target_layer_ids, sources)
        for example, states in zip(examples, found, strict=True):
            first = example.first_target - 1
            greedy = torch.full((len(example.input_ids),), -1, device=states.final.device)
            greedy[first:] = self.verifier.greedy(states.final[first:])
            final = states.final.clone() if self.with_final else None
            results.append(ExampleStates(states.taps.clone(), greedy, final))
        return results


class TrainingStates:
    """States of a run's examples by index, as many of them in memory as the allowance permits.

    Args:
        prefetch: packed rows that may be asked for before they are needed, where the provider reads ahead.

    Attributes:
        waited: seconds that `get` has waited for states.
    """

    def __init__(
        self, provider: HiddenStateProvider, examples: Sequence[Example], memory_gib: float, prefetch: int = 0
    ) -> None:
        self.provider = provider
        self.prefetch = prefetch if provider.reads_ahead else 0
        self.waited = 0.0
        self._examples = examples
        self._kept: dict[int, ExampleStates] = {}
        self._allowance = int(memory_gib * 2**30)
        self._asked: dict[tuple[int, ...], Future[list[ExampleStates]]] = {}
        self._pool = ThreadPoolExecutor(self.prefetch, thread_name_prefix="prefetch") if self.prefetch else None

    def prepare(self) -> None:
        """Let the provider do what it does once."""
        if not self._kept:
            self.provider.prepare(self._examples)

    def fill(self, wanted: Collection[int] | None = None) -> None:
        """Take examples, longest first, until the allowance is used up. Done once.

        Args:
            wanted: the indices that this process will ask for; None: all.
        """
        if self._kept:
            return
        fitting = []
        for index in longest_first(self._examples):
            if wanted is not None and index not in wanted:
                continue
            size = len(self._examples[index].input_ids) * self.provider.bytes_per_token
            if size > self._allowance:
                break
            self._allowance -= size
            fitting.append(index)
        with progress("hidden states", len(fitting)) as advance:
            for group in grouped(fitting):
                self._kept.update(zip(group, self._ask(group), strict=True))
                advance(len(group))

    def get(
        self, indices: Sequence[int], noise_std: float = 0.0, generator: torch.Generator | None = None
    ) -> list[ExampleStates]:
        """States of the examples, those that are not kept asked for together.

        `noise_std` adds uniform noise of that half-width to the taps (a training-time regulariser).
        """
        missing = [index for index in indices if index not in self._kept]
        start = time.monotonic()
        asked = self._asked.pop(tuple(missing), None)
        fresh = dict(zip(missing, self._ask(missing) if asked is None else asked.result(), strict=True))
        self.waited += time.monotonic() - start
        found = [self._kept[index] if index in self._kept else fresh[index] for index in indices]
        if not noise_std:
            return found
        return [dataclasses.replace(states, taps=_noisy(states.taps, noise_std, generator)) for states in found]

    def expect(self, rows: Iterable[Sequence[int]]) -> None:
        """Ask for the rows that come next, as many as may be ahead; `get` takes each of them once."""
        for indices in rows:
            missing = tuple(index for index in indices if index not in self._kept)
            if self._pool is None or len(self._asked) >= self.prefetch:
                return
            if missing and missing not in self._asked:
                self._asked[missing] = self._pool.submit(self._ask, missing)

    def close(self) -> None:
        """Nothing more will be asked for."""
        self.provider.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def sample_taps(self, num_examples: int) -> Tensor:
        """Taps of some examples for calibration, outlier positions left out, [T, L, E]."""
        stride = max(1, len(self._examples) // num_examples)
        chosen = self.get(list(range(0, len(self._examples), stride))[:num_examples])
        return torch.cat([states.taps[SINK_POSITIONS:] for states in chosen])

    def _ask(self, indices: Sequence[int]) -> list[ExampleStates]:
        return self.provider.get([self._examples[index] for index in indices])


def longest_first(examples: Sequence[Example]) -> list[int]:
    """Indices of examples in the order in which they are run: little padding, and what needs most memory at once."""
    lengths = [len(example.input_ids) for example in examples]
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def grouped(indices: Sequence[int]) -> Iterator[Sequence[int]]:
    """The groups in which examples are run together."""
    return (indices[first : first + GROUP] for first in range(0, len(indices), GROUP))


def _noisy(taps: Tensor, half_width: float, generator: torch.Generator | None) -> Tensor:
    noise = torch.rand(taps.shape, generator=generator).to(taps)
    return taps + (2 * noise - 1) * half_width
