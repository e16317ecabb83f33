"""Hidden states for training, made in process by the verifier; nothing is written to disk.

Documents are run in fixed groups before training until the memory allowance is used up; what does not fit is run
anew with each packed row. Either way a document's states do not depend on where training stands, so that a resumed
run sees the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.progress import progress
from blockdraft.records import Document
from blockdraft.verifiers.base import Verifier

GROUP = 16  # documents run together
SINK_POSITIONS = 4  # first positions of a text, whose states are outliers and are kept out of statistics


@dataclass(frozen=True, slots=True)
class DocumentStates:
    """What the verifier says about a document.

    Attributes:
        taps: [T, L, E], in the verifier's dtype.
        greedy: the verifier's own next token after each position, int64 [T]; filled from the token before
            the first target on, before that it is -1 and never read.
        final: states after the final norm, [T, E], where an objective needs the verifier's distributions; else None.
    """

    taps: Tensor
    greedy: Tensor
    final: Tensor | None = None


class InProcessStates:
    """Taps and targets of documents by index."""

    def __init__(
        self,
        verifier: Verifier,
        documents: Sequence[Document],
        tap_ids: Sequence[int],
        memory_gib: float,
        with_final: bool = False,
    ) -> None:
        self._verifier, self._documents, self._tap_ids = verifier, documents, tuple(tap_ids)
        self._with_final = with_final
        self._kept: dict[int, DocumentStates] = {}
        self._allowance = int(memory_gib * 2**30)

    def fill(self) -> None:
        """Run documents, longest first, and keep their states until the allowance is used up. Done once."""
        kept = len(self._tap_ids) + self._with_final
        per_token = kept * self._verifier.identity.hidden_size * self._verifier.dtype.itemsize + 8
        if self._kept:
            return
        order = sorted(range(len(self._documents)), key=lambda i: (-len(self._documents[i].input_ids), i))
        fitting = []
        for index in order:
            size = len(self._documents[index].input_ids) * per_token
            if size > self._allowance:
                break
            self._allowance -= size
            fitting.append(index)
        with progress("hidden states", len(fitting)) as advance:
            for first in range(0, len(fitting), GROUP):
                group = fitting[first : first + GROUP]
                self._kept.update(zip(group, self._run(group), strict=True))
                advance(len(group))

    def get(
        self, indices: Sequence[int], noise_std: float = 0.0, generator: torch.Generator | None = None
    ) -> list[DocumentStates]:
        """States of the documents, those that are not kept run together.

        `noise_std` adds uniform noise of that half-width to the taps (a training-time regulariser).
        """
        missing = [index for index in indices if index not in self._kept]
        fresh = dict(zip(missing, self._run(missing), strict=True)) if missing else {}
        found = [self._kept[index] if index in self._kept else fresh[index] for index in indices]
        if not noise_std:
            return found
        return [dataclasses.replace(states, taps=_noisy(states.taps, noise_std, generator)) for states in found]

    def sample_taps(self, num_documents: int) -> Tensor:
        """Taps of some documents for calibration, outlier positions left out, [T, L, E]."""
        stride = max(1, len(self._documents) // num_documents)
        chosen = self.get(list(range(0, len(self._documents), stride))[:num_documents])
        return torch.cat([states.taps[SINK_POSITIONS:] for states in chosen])

    def _run(self, indices: Sequence[int]) -> list[DocumentStates]:
        documents = [self._documents[index] for index in indices]
        sequences = [torch.tensor(document.input_ids) for document in documents]
        results = []
        sources = [document.source_ids for document in documents]
        found = self._verifier.states(sequences, self._tap_ids, sources)
        for document, states in zip(documents, found, strict=True):
            first = document.first_target - 1
            greedy = torch.full((len(document.input_ids),), -1, device=states.final.device)
            greedy[first:] = self._verifier.greedy(states.final[first:])
            final = states.final.clone() if self._with_final else None
            results.append(DocumentStates(states.taps.clone(), greedy, final))
        return results


def _noisy(taps: Tensor, half_width: float, generator: torch.Generator | None) -> Tensor:
    noise = torch.rand(taps.shape, generator=generator).to(taps)
    return taps + (2 * noise - 1) * half_width
