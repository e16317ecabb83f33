"""What a run will do, before it does anything: settings, verifier and examples checked against each other.

Which examples a row holds and which anchors are drawn follow from the seed and the number of the row alone, so that a
run that was killed and resumed computes the same bits as one that was not.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blockdraft.data.packing import PackedRow, pack_row, packed_order
from blockdraft.data.templates import ChatMode
from blockdraft.errors import InputError
from blockdraft.ops.anchors import Blocks, choose_anchors
from blockdraft.records import Example, examples_digest
from blockdraft.settings import TRAIN_DATA_RATIO, TrainSettings, identity
from blockdraft.training.creation import (
    draft_config,
    draft_vocabulary,
    make_contract,
    make_objective,
    resolve_mask_token,
)
from blockdraft.training.engine_states import EngineStates, Patience
from blockdraft.training.hidden_state_files import HiddenStateFiles
from blockdraft.training.hidden_states import HiddenStateMaker, HiddenStateProvider, InProcess, TrainingStates
from blockdraft.training.loggers import log_folder
from blockdraft.training.parent import read_parent
from blockdraft.training.processes import ALONE, Processes
from blockdraft.training.split import joined, split_examples
from blockdraft.verifiers.base import TrainingVerifier


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """A row of a step, with its anchors drawn.

    Attributes:
        indices: the examples that it holds.
        generator: draws what else is drawn for the row.
    """

    indices: list[int]
    packed: PackedRow
    blocks: Blocks
    generator: torch.Generator


class TrainingPlan:
    """Everything about a run that is known before hidden states are made. Nothing is written.

    Args:
        states: hidden states of another plan with the same data, split and taps, so that they are made once.
        mode: what the chat template was told when the data were made; it goes with the checkpoint.
        processes: those that train together. They hold the same plan, but for `share_of` a step.

    Attributes:
        train, validation: the two sides of the split.
        parent: the checkpoint that training starts from; None without one.
        vocabulary: the verifier's ids that the draft can propose; None where it can propose all.
        rows: example indices of every row of the whole run, in order.
        states: hidden states of `examples`, not made yet.

    Raises:
        InputError: a setting that does not fit the verifier or the data.
    """

    def __init__(
        self,
        settings: TrainSettings,
        verifier: TrainingVerifier,
        examples: Sequence[Example],
        states: TrainingStates | None = None,
        mode: ChatMode | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.settings, self.verifier, self.mode = settings, verifier, mode or ChatMode()
        self.processes = processes
        if settings.fsdp_shard and processes.count == 1:
            raise InputError("--fsdp-shard", True, "divides a draft among processes; start several by torchrun")
        self.log_folder = log_folder(settings)
        self.objective = make_objective(settings, settings.speculator_type)
        self.parent = read_parent(settings, verifier)
        self.config = draft_config(settings, verifier, examples) if self.parent is None else self.parent.contract.draft
        if self.parent is not None:
            resolve_mask_token(self.config.mask_token_id, verifier, examples)
        provider = states.provider if states else self._provider()
        examples = provider.available(examples)
        self.train, self.validation = split_examples(examples, settings.train_data_ratio or TRAIN_DATA_RATIO)
        self.vocabulary = draft_vocabulary(self.config, self.train) if self.parent is None else self.parent.vocabulary
        self.contract = make_contract(self.config, verifier, self.vocabulary)
        self.rows = self._rows()
        self.rows_per_step = settings.grad_accum * processes.count
        self.total_steps = math.ceil(len(self.rows) / self.rows_per_step)
        self.states = states or TrainingStates(provider, self.examples, settings.states_memory_gib, settings.prefetch)

    def _provider(self) -> HiddenStateProvider:
        """Where hidden states come from."""
        settings = self.settings
        asked = (self.verifier, self.config.target_layer_ids, self.objective.needs_teacher)
        maker: HiddenStateMaker
        if settings.vllm_endpoint:
            patience = Patience(settings.max_retries, settings.request_timeout, settings.num_workers)
            maker = EngineStates(settings.vllm_endpoint, *asked, patience)
        else:
            maker = InProcess(*asked)
        if settings.hidden_states_path is None:
            return maker
        return HiddenStateFiles(settings.hidden_states_path, maker, settings.on_missing, settings.on_generate)

    def _rows(self) -> list[list[int]]:
        settings = self.settings
        lengths = [len(example.input_ids) for example in self.train]
        rows: list[list[int]] = []
        for epoch in range(math.ceil(settings.epochs)):
            epoch_rows = packed_order(lengths, settings.total_seq_len, settings.seed, epoch)
            share = min(1.0, settings.epochs - epoch)
            rows.extend(epoch_rows[: max(1, round(share * len(epoch_rows)))])
        return rows

    @property
    def examples(self) -> Sequence[Example]:
        """Those that train, and behind them those that validate."""
        return joined(self.train, self.validation)

    @property
    def steps_per_epoch(self) -> float:
        return self.total_steps / self.settings.epochs

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """Everything that determines the trained weights."""
        # Where data and verifier lie does not matter; what they are does. A run may be resumed on another device.
        contract = self.contract.to_dict()
        del contract["verifier"]["name"]
        return {
            **identity(self.settings),
            "contract": contract,
            "data": examples_digest(itertools.chain(self.train, self.validation)),
            **({} if self.parent is None else {"parent": self.parent.facts["digest"]}),
        }

    def rows_of(self, step: int) -> range:
        """Numbers of the rows of a step: `grad_accum` of them for each process, or those that are left."""
        return range(step * self.rows_per_step, min((step + 1) * self.rows_per_step, len(self.rows)))

    def share_of(self, step: int) -> range:
        """Those of them that this process trains on; none at an uneven end."""
        return self.rows_of(step)[self.processes.rank :: self.processes.count]

    def rows_after(self, step: int) -> Iterator[Sequence[int]]:
        """Examples of the rows that this process trains on from a step on, in order."""
        return (self.rows[number] for later in range(step, self.total_steps) for number in self.share_of(later))

    @property
    def own_validation(self) -> Sequence[int]:
        """Indices in `examples` of those that this process validates."""
        return self.processes.share(range(len(self.train), len(self.train) + len(self.validation)))

    @property
    def own_examples(self) -> frozenset[int]:
        """Indices in `examples` of all whose states this process asks for while it trains and validates."""
        steps = map(self.share_of, range(self.total_steps))
        trained = {index for rows in steps for number in rows for index in self.rows[number]}
        return frozenset(trained.union(self.own_validation))

    def draw(self, number: int) -> DrawnRow:
        """Pack a row and draw its anchors."""
        indices = self.rows[number]
        row = pack_row([self.train[example] for example in indices])
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + number)
        blocks = choose_anchors(row.loss_mask, row.lengths, self.settings.max_anchors, generator)
        return DrawnRow(indices, row, blocks, generator)
