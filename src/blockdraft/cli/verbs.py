"""The table of verbs. What a verb imports is imported when it runs, so that --help stays instant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from blockdraft import settings as s
from blockdraft.errors import InputError
from blockdraft.extras import TRAIN, require
from blockdraft.runtime import process_place


@dataclass(frozen=True, slots=True)
class Verb:
    """A command.

    Attributes:
        function: "module:function" from settings to a JSON-ready result.
        show: "module:function" that prints a result for people.
        examples: shown under --help.
        streams: whether the function prints while it works; it is then told whether the result will be printed as JSON.
        joins: whether several processes of `torchrun` may run it together.
        trains: whether it needs the packages of the extra `train` whatever it is asked for.
    """

    settings: type
    function: str
    show: str
    examples: tuple[str, ...]
    streams: bool = False
    joins: bool = False
    trains: bool = False

    def run(self, settings: Any, as_json: bool) -> dict[str, Any]:
        _, count = process_place()
        if count > 1 and not self.joins:
            raise InputError("torchrun", f"{count} processes", "only `blockdraft train` runs in several; start one")
        if self.trains:
            require(*TRAIN)
        function = _load(self.function)
        result: dict[str, Any] = function(settings, as_json) if self.streams else function(settings)
        return result

    def display(self, result: dict[str, Any]) -> None:
        _load(self.show)(result)


_PIPELINE = "blockdraft.pipeline."
_TABLES = "blockdraft.cli.tables:"

VERBS: dict[str, Verb] = {
    "quickstart": Verb(
        s.QuickstartSettings,
        _PIPELINE + "quickstart:quickstart",
        _TABLES + "show_quickstart",
        (
            "blockdraft quickstart",
            "blockdraft quickstart --method dflare --minutes 3",
            "blockdraft quickstart --workload chat",
        ),
        trains=True,
    ),
    "convert": Verb(
        s.ConvertSettings,
        _PIPELINE + "convert:convert",
        _TABLES + "show_fields",
        ("blockdraft convert smollm2-135m-instruct --save-path runs/verifier",),
    ),
    "prepare": Verb(
        s.PrepareSettings,
        _PIPELINE + "prepare:prepare",
        _TABLES + "show_prepared",
        (
            "blockdraft prepare --source demo=builtin/records --prompts-only --save-path runs/prompts",
            "blockdraft prepare --source math=gsm8k.jsonl@500 --source chat=org/set:train@1500 --save-path runs/data",
            "blockdraft prepare --source chat=conversations.jsonl --preview 3",
        ),
        trains=True,
    ),
    "regenerate": Verb(
        s.RegenerateSettings,
        _PIPELINE + "regenerate:regenerate",
        _TABLES + "show_prepared",
        (
            "blockdraft regenerate --data-path runs/prompts --save-path runs/data",
            "blockdraft regenerate --data-path runs/prompts --save-path runs/data --endpoint http://127.0.0.1:8000",
        ),
        trains=True,
    ),
    "states": Verb(
        s.StatesSettings,
        _PIPELINE + "states:states",
        _TABLES + "show_fields",
        (
            "blockdraft states --data-path runs/data --hidden-states-path runs/states",
            "blockdraft states --config recipe.yaml --hidden-states-path /disk/states",
        ),
        trains=True,
    ),
    "train": Verb(
        s.TrainSettings,
        _PIPELINE + "train:train",
        _TABLES + "show_training",
        (
            "blockdraft train --data-path runs/data --save-path runs/draft --mask-token-id 4",
            "blockdraft train --config recipe.yaml --speculator-type dflare --epochs 3",
            "torchrun --nproc-per-node 4 -m blockdraft train --config recipe.yaml --fsdp-shard",
        ),
        joins=True,
        trains=True,
    ),
    "evaluate": Verb(
        s.EvaluateSettings,
        _PIPELINE + "evaluate:evaluate",
        _TABLES + "show_evaluation",
        (
            "blockdraft evaluate runs/draft/checkpoint_best",
            "blockdraft evaluate runs/draft/checkpoint_best --k 3 7 --decode --dtype float32",
        ),
    ),
    "generate": Verb(
        s.GenerateSettings,
        "blockdraft.cli.stream:generate",
        _TABLES + "show_generation",
        (
            "blockdraft generate runs/draft/checkpoint_best --workload records --max-prompts 1 --show-drafts",
            "blockdraft generate runs/draft/checkpoint_best --data-path prompts.jsonl --batch-size 8 --json",
            'blockdraft generate runs/draft/checkpoint_best "List five fruits." --engine vllm',
        ),
        streams=True,
    ),
    "check": Verb(
        s.CheckSettings,
        _PIPELINE + "check:check",
        _TABLES + "show_check",
        (
            "blockdraft check runs/draft/checkpoint_best",
            "blockdraft check runs/draft/checkpoint_best --verifier-name-or-path runs/verifier",
        ),
    ),
    "card": Verb(
        s.CardSettings,
        _PIPELINE + "card:card",
        _TABLES + "show_card",
        (
            "blockdraft card runs/draft/checkpoint_best --license apache-2.0 --base-model org/verifier",
            "blockdraft card runs/draft/checkpoint_best --bench runs/bench --push org/draft --dry-run",
        ),
    ),
    "serve": Verb(
        s.ServeSettings,
        _PIPELINE + "serve:serve",
        _TABLES + "show_fields",
        (
            "blockdraft serve runs/draft/checkpoint_best",
            "blockdraft serve runs/draft/checkpoint_best --k 3 --port 8100 --max-num-seqs 8 --max-model-len 2048",
        ),
    ),
    "parity": Verb(
        s.ParitySettings,
        _PIPELINE + "parity:parity",
        _TABLES + "show_parity",
        (
            "blockdraft parity runs/draft/checkpoint_best --dtype float32 --k 1 3 7",
            "blockdraft parity runs/draft/checkpoint_best --endpoint http://127.0.0.1:8000 --record blocks.jsonl",
        ),
    ),
}


def _load(path: str) -> Callable[..., Any]:
    module, name = path.split(":")
    return getattr(import_module(module), name)
