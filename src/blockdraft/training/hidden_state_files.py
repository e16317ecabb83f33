"""Hidden states on disk: one safetensors file an example, under a name that is the digest of what the example says.

`states.json` beside them says which verifier, taps and dtype they are of; a folder of others is rejected. A file holds
`taps` [T, L, E], `greedy` int64 [T] and, where they were asked for, `final` [T, E] (`DocumentStates`).
Since a name follows from the content, a folder serves any data that holds the same texts, and grows with them.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from blockdraft.data.table import Examples
from blockdraft.digests import already_made
from blockdraft.errors import BlockdraftError, InputError
from blockdraft.files import clear_temporaries, locked, read_json_object, require_free, write_bytes, write_json, writing
from blockdraft.progress import progress, warn
from blockdraft.records import Example, examples_digest
from blockdraft.runtime import dtype_name
from blockdraft.training.hidden_states import ExampleStates, HiddenStateMaker, grouped, longest_first
from blockdraft.typed import checked

RECORD, FIELD = "states.json", "--hidden-states-path"
_SPARE = 2**30  # bytes that stay free on the disk


class HiddenStateFiles:
    """A provider that reads what its folder holds and makes the rest with `maker`.

    Args:
        folder: made if it is not there. It may hold more taps than `maker` gives, and final states that it does not ask
            for: what is made is then made as the folder has it, and what is given is what `maker` would give.
        on_missing: what becomes of examples without a file: "generate", "skip", "warn" (skip, naming them), "raise".
        on_generate: "cache" keeps what is made, "delete" does not.

    Raises:
        InputError: the folder holds states of another verifier, dtype or depth, or something else.
    """

    def __init__(
        self, folder: Path, maker: HiddenStateMaker, on_missing: str = "generate", on_generate: str = "cache"
    ) -> None:
        self.folder, self._on_missing, self._on_generate = folder, on_missing, on_generate
        self._asked = maker
        self.bytes_per_token, self.reads_ahead = maker.bytes_per_token, maker.reads_ahead
        self._open()

    def _open(self) -> None:
        """Take up what the folder is of."""
        self._maker = self._as_the_folder_has_it(self._asked)
        self._selected = [self._maker.target_layer_ids.index(tap) for tap in self._asked.target_layer_ids]

    def _as_the_folder_has_it(self, maker: HiddenStateMaker) -> HiddenStateMaker:
        record = self.folder / RECORD
        if not record.exists():
            require_free(self.folder, FIELD, own=".")  # hidden: what another process has just begun
            return maker
        facts = read_json_object(record, FIELD).get("facts")
        found = checked({"tap_ids": list[int], "with_final": bool}, facts, f"{FIELD} {record} facts")
        taps, has_final = found["tap_ids"], found["with_final"]
        if len(set(taps)) < len(taps) or not set(taps) <= set(range(maker.verifier.identity.num_layers + 1)):
            raise InputError(f"{FIELD} {record} tap_ids", taps, "the verifier has no such taps; the file is damaged")
        if set(maker.target_layer_ids) <= set(taps) and has_final >= maker.with_final:
            maker = maker.giving(taps, has_final)
        already_made(record, _comparable(_facts(maker), facts), FIELD)
        return maker

    def path(self, example: Example) -> Path:
        """Where the states of an example are, or would be."""
        name = examples_digest([example])[:32]
        return self.folder / name[:2] / f"{name[2:]}.safetensors"

    def size(self, examples: Sequence[Example]) -> int:
        """Bytes that the files of examples take."""
        return sum(len(example.input_ids) for example in examples) * self._maker.bytes_per_token

    def missing(self, examples: Sequence[Example]) -> list[int]:
        """Indices of examples that have no file."""
        return [index for index, example in enumerate(examples) if not self.path(example).is_file()]

    def available(self, examples: Sequence[Example]) -> Sequence[Example]:
        if self._on_missing == "generate":
            return self._maker.available(examples) if self.missing(examples) else examples
        missing = self.missing(examples)
        if not missing:
            return examples
        first = examples[missing[0]].id
        if self._on_missing == "raise" or len(missing) == len(examples):
            raise InputError(
                FIELD, self.folder, f"lacks {len(missing)} of {len(examples)} examples (the first: {first}); "
                "make them with blockdraft states, or give --on-missing generate",
            )  # fmt: skip
        warn(f"hidden states: {len(missing)} of {len(examples)} examples have none and are left out")
        if self._on_missing == "warn":
            for index in missing:
                warn(f"  no hidden states: {examples[index].id}")
        left_out = set(missing)
        kept = [index for index in range(len(examples)) if index not in left_out]
        return examples.select(kept) if isinstance(examples, Examples) else [examples[index] for index in kept]

    def prepare(self, examples: Sequence[Example]) -> None:
        """Make the files that are missing, unless they would not be kept.

        One process at a time makes files in a folder; any number may read what is there.

        Raises:
            InputError: the disk has no room for them, or another process is making files there.
        """
        if self._on_generate == "delete" or not self.missing(examples):
            return
        with locked(self.folder, FIELD):
            self._open()  # again, since another process may have begun it
            self._make(examples, set(self.missing(examples)))

    def _make(self, examples: Sequence[Example], missing: set[int]) -> None:
        self._require_room([examples[index] for index in missing])
        if not (self.folder / RECORD).is_file():
            write_json(self.folder / RECORD, {"facts": _facts(self._maker)})
        clear_temporaries(self.folder, "*/.*.tmp")  # of processes that were killed
        order = [index for index in longest_first(examples) if index in missing]
        with progress("hidden states on disk", len(order)) as advance:
            for group in grouped(order):
                self._made([examples[index] for index in group])
                advance(len(group))

    def get(self, examples: Sequence[Example]) -> list[ExampleStates]:
        found = {index: states for index, example in enumerate(examples) if (states := self._read(example))}
        missing = [index for index in range(len(examples)) if index not in found]
        if missing and self._on_missing != "generate":
            raise BlockdraftError(
                f"{self.path(examples[missing[0]])}: gone or damaged since the run began; make it with "
                "blockdraft states and run the same command again"
            )
        made = self._made([examples[index] for index in missing])
        found.update(zip(missing, made, strict=True))
        return [self._given(found[index]) for index in range(len(examples))]

    def close(self) -> None:
        self._maker.close()

    def _require_room(self, examples: Sequence[Example]) -> None:
        needed = self.size(examples)
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free - _SPARE
        if needed > free:
            raise InputError(
                FIELD, self.folder, f"{len(examples)} examples need {needed / 2**30:.1f} GiB there and "
                f"{max(free, 0) / 2**30:.1f} are free; choose another disk, or leave it out and make states in process",
            )  # fmt: skip

    def _made(self, examples: Sequence[Example]) -> list[ExampleStates]:
        made = self._maker.get(examples)
        if self._on_generate == "cache":
            for example, states in zip(examples, made, strict=True):
                tensors = {"taps": states.taps, "greedy": states.greedy}
                if states.final is not None:
                    tensors["final"] = states.final
                write_bytes(self.path(example), save({name: t.cpu().contiguous() for name, t in tensors.items()}))
        return made

    def _read(self, example: Example) -> ExampleStates | None:
        """What an example's file holds; None without one, or if it is damaged, which is said."""
        path = self.path(example)
        if not path.is_file():
            return None
        length, verifier = len(example.input_ids), self._maker.verifier
        width = verifier.identity.hidden_size
        shapes = {"taps": [length, len(self._maker.target_layer_ids), width], "greedy": [length]}
        if self._maker.with_final:
            shapes["final"] = [length, width]
        try:
            # Read on the CPU and moved: the reader knows fewer devices than torch does.
            with safe_open(path, framework="pt", device="cpu") as file:
                names = file.keys()
                tensors = {name: file.get_tensor(name).to(verifier.device) for name in names}
        except (SafetensorError, OSError) as error:
            warn(f"hidden states: {path} is damaged ({error})")
            return None
        if {name: list(tensor.shape) for name, tensor in tensors.items()} != shapes:
            warn(f"hidden states: {path} is not what its name says")
            return None
        return ExampleStates(tensors["taps"], tensors["greedy"], tensors.get("final"))

    def _given(self, states: ExampleStates) -> ExampleStates:
        """The part of an example's states that was asked for."""
        as_they_are = self._selected == list(range(states.taps.shape[1]))
        taps = states.taps if as_they_are else states.taps[:, self._selected]
        return ExampleStates(taps, states.greedy, states.final if self._asked.with_final else None)


def _comparable(facts: dict[str, Any], found: Any) -> dict[str, Any]:
    """Facts of a maker, with the found digest of matrices where its own verifier has none: parts lack the matrices."""
    verifier, theirs = facts["verifier"], found.get("verifier")
    if verifier["matrices_digest"] is not None or not isinstance(theirs, dict):
        return facts
    return {**facts, "verifier": {**verifier, "matrices_digest": theirs.get("matrices_digest")}}


def _facts(maker: HiddenStateMaker) -> dict[str, Any]:
    """What the states of a folder are of."""
    identity = maker.verifier.identity
    return {
        "verifier": {name: getattr(identity, name) for name in identity.COMPARED},  # wherever it was loaded from
        "dtype": dtype_name(maker.verifier.dtype),
        "tap_convention": "after_layers",
        "tap_kind": "residual_stream",
        "tap_ids": list(maker.target_layer_ids),
        "with_final": maker.with_final,
    }
