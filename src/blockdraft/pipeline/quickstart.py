"""`blockdraft quickstart`: the whole loop on a real small model.

Every stage writes into a folder named after a digest of what determines its result. A stage whose result is there is
not repeated, a changed setting leads to another folder, and a stage that was stopped goes on where it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blockdraft.checkpoints.examine.facts import CARD
from blockdraft.choices import Dtype
from blockdraft.data.table import RECORD, read_examples
from blockdraft.data.vocabulary import occurring_tokens
from blockdraft.data.workloads import workload_prompts
from blockdraft.decoding.engine import DecodingEngine
from blockdraft.decoding.identity import TIE_CEILING
from blockdraft.digests import digest_of
from blockdraft.errors import InputError
from blockdraft.files import locked, read_json, write_json
from blockdraft.ops.acceptance import AcceptanceCounts
from blockdraft.pipeline.card import card
from blockdraft.pipeline.evaluate import num_same_rounds, one_pass, proof_failures, prove_by_decoding
from blockdraft.pipeline.loading import Pair, encode_all, load_pair
from blockdraft.pipeline.prepare import prepare
from blockdraft.pipeline.regenerate import regenerate
from blockdraft.pipeline.train import train
from blockdraft.progress import progress, say
from blockdraft.records import Example
from blockdraft.runtime import limit_threads, machine_description, resolve_device, resolve_dtype
from blockdraft.settings import (
    CardSettings,
    CheckpointSettings,
    PrepareSettings,
    QuickstartSettings,
    RegenerateSettings,
    SamplingSettings,
    TrainSettings,
    build,
    read_recipe,
    resolved,
)
from blockdraft.training.creation import free_control_tokens
from blockdraft.training.history import read_summary
from blockdraft.training.plan import TrainingPlan
from blockdraft.training.run_folder import LAST
from blockdraft.training.trainer import Trainer
from blockdraft.typed import checked
from blockdraft.verifiers.base import Verifier
from blockdraft.verifiers.hub import is_gguf, require_hub_id
from blockdraft.verifiers.loading import load_verifier, save_folder, source_digest

EXACT_K, SHOWN_KS = 7, (3, 7)
RESULT_FORMAT = 3  # 2: `failures`; 3: `mismatches`
TIE_RULE = "measured bound"  # part of what determines a result: results of another rule are not reused
REGENERATE_BATCH = 64
MOST_EPOCHS = 10**6
TRAIN_RECIPE = Path("quickstart.train")
TRAIN_SHARE = 0.95  # few prompts: most of them are needed for training


@dataclass(frozen=True, slots=True)
class Run:
    """What the stages share, and the folders that follow from the settings.

    Attributes:
        verifier_folder: what transformers and vLLM load; a GGUF verifier is unpacked into it.
    """

    settings: QuickstartSettings
    root: Path
    verifier_folder: str
    dtype: torch.dtype

    def origin(self) -> dict[str, Any]:
        """Settings of every command that names the verifier."""
        return {"trust_remote_code": self.settings.trust_remote_code, "revision": self.settings.revision}

    @property
    def dtype_name(self) -> Dtype:
        return "bfloat16" if self.dtype == torch.bfloat16 else "float32"

    def load(self) -> Verifier:
        return load_verifier(self.verifier_folder, self.dtype, self.settings.device, **self.origin())

    @property
    def source(self) -> str:
        settings = self.settings
        amount = f"@{settings.max_prompts}" if settings.max_prompts else ""
        return f"{settings.workload}=builtin/{settings.workload}{amount}"

    @property
    def prompts(self) -> Path:
        facts = [self.verifier_folder, self.settings.revision, self.source, TRAIN_SHARE]
        return self.root / f"prompts-{digest_of(facts)}"

    @property
    def data(self) -> Path:
        """The prompts with the verifier's own replies."""
        facts = [self.prompts.name, self.dtype_name, self.settings.max_new_tokens]
        return self.root / f"data-{digest_of(facts)}"

    @property
    def training(self) -> Path:
        settings = self.settings
        recipe = read_recipe(TRAIN_RECIPE, TrainSettings)
        facts = [self.data.name, settings.method, settings.minutes, settings.seed, _TRAIN_DEFAULTS, recipe]
        return self.root / f"{settings.method}-{digest_of(facts)}"

    @property
    def plan(self) -> Path:
        """How long to train, as the first of the runs that were stopped decided."""
        return self.training / "plan.json"


def run_of(settings: QuickstartSettings) -> Run:
    """The run that settings ask for; nothing is made yet."""
    root, name = settings.save_path.resolve(), settings.verifier_name_or_path
    require_hub_id(name, settings.revision)
    if is_gguf(name):
        folder = str(root / f"verifier-{source_digest(name)}")
    else:
        folder = str(Path(name).resolve()) if Path(name).is_dir() else name
    return Run(settings, root, folder, resolve_dtype(settings.dtype, resolve_device(settings.device)))


def quickstart(settings: QuickstartSettings) -> dict[str, Any]:
    """Run what is missing of the loop and return its result as one JSON-ready object."""
    with locked(settings.save_path, "--save-path"):
        return _quickstart(settings)


def _quickstart(settings: QuickstartSettings) -> dict[str, Any]:
    limit_threads(settings.threads)
    run = run_of(settings)
    _unpack_verifier(run)
    heldout = workload_prompts(settings.workload)[1][: settings.max_heldout or None]
    verifier = _Lazy(run.load)
    _make_data(run, verifier)
    say(f"[2/4] training a {settings.method} draft for about {settings.minutes:g} minutes")
    checkpoint = _train(run, verifier)
    say(f"[3/4] acceptance, and [4/4] decoding {len(heldout)} held-out prompts with and without the draft")
    result = _measure(run, checkpoint, heldout)
    return {**result, "card": _card(checkpoint, settings)}


def _card(checkpoint: Path, settings: QuickstartSettings) -> str | None:
    """The draft's model card; None where the checkpoint contradicts itself, which the card's command then says."""
    path = checkpoint / CARD
    if not path.is_file():  # else of an earlier run, and perhaps edited since
        card(CardSettings(checkpoint=checkpoint, trust_remote_code=settings.trust_remote_code))
    return str(path) if path.is_file() else None


class _Lazy:
    """A verifier that is loaded when a stage needs it, and once."""

    def __init__(self, load: Callable[[], Verifier]) -> None:
        self._load = load
        self._verifier: Verifier | None = None

    def __call__(self) -> Verifier:
        if self._verifier is None:
            self._verifier = self._load()
        return self._verifier


def _unpack_verifier(run: Run) -> None:
    """Make a folder that transformers and vLLM load of a GGUF verifier."""
    name, folder = run.settings.verifier_name_or_path, Path(run.verifier_folder)
    if is_gguf(name) and not (folder / "config.json").is_file():
        say(f"[0/4] unpacking the verifier {name}")
        save_folder(load_verifier(name, torch.float32, "cpu"), folder)


def _make_data(run: Run, verifier: _Lazy) -> None:
    """The workload's prompts with the verifier's own replies, by the commands that everybody uses."""
    settings = run.settings
    prepared = prepare(
        PrepareSettings(
            verifier_name_or_path=run.verifier_folder, source=(run.source,), save_path=run.prompts, prompts_only=True,
            train_data_ratio=TRAIN_SHARE, **run.origin(),
        )
    )  # fmt: skip
    say(f"[1/4] the verifier's own replies to {prepared['documents']} prompts")
    if (run.data / RECORD).is_file():
        say("      done before")
        return
    wanted = RegenerateSettings(
        verifier_name_or_path=run.verifier_folder, dtype=run.dtype_name, device=settings.device,
        threads=settings.threads, data_path=run.prompts, save_path=run.data, max_new_tokens=settings.max_new_tokens,
        batch_size=REGENERATE_BATCH, **run.origin(),
    )  # fmt: skip
    regenerate(wanted, verifier())


def _train_settings(run: Run, verifier: Verifier, examples: Sequence[Example]) -> TrainSettings:
    """The quickstart's way to train: its recipe, and a mask token found for it."""
    settings = run.settings
    mask = None
    if verifier.tokenizer.mask_token_id is None and len(verifier.tokenizer) >= verifier.identity.vocab_size:
        seen = occurring_tokens(examples)
        mask = next((index for index, _ in free_control_tokens(verifier.tokenizer, seen)), None)
    places = {
        "verifier_name_or_path": run.verifier_folder,
        "dtype": run.dtype_name,
        "device": settings.device,
        "threads": settings.threads,
        "data_path": run.data,
        "save_path": run.training,
        "speculator_type": settings.method,
        "mask_token_id": mask,
        "seed": settings.seed,
    }
    return build(TrainSettings, {**places, **run.origin()}, TRAIN_RECIPE)


def _train(run: Run, verifier: _Lazy) -> Path:
    """Train for about the asked number of minutes; the number of steps is fixed once and kept for a resumed run."""
    checkpoint = run.training / LAST
    if checkpoint.is_dir():
        say("      done before")
        return checkpoint
    examples, states = read_examples(run.data, "--save-path"), None
    base = _train_settings(run, verifier(), examples)
    if not run.plan.is_file():
        plan = TrainingPlan(dataclasses.replace(base, train_data_ratio=TRAIN_SHARE), verifier(), examples)
        seconds, states = Trainer.fresh(plan).seconds_per_step(), plan.states
        epochs = max(0.01, round(run.settings.minutes * 60 / seconds / plan.steps_per_epoch, 2))
        write_json(run.plan, {"seconds_per_step": seconds, "epochs": epochs})
        say(f"      {seconds:.2f} s a step: {epochs:g} epochs in {run.settings.minutes:g} minutes")
    settings = dataclasses.replace(base, epochs=planned_epochs(run.plan))
    train(settings, verifier(), states)
    return checkpoint


def planned_epochs(path: Path) -> float:
    """How long to train, as a plan has it."""
    where = f"--save-path {path}"
    epochs: float = checked({"epochs": float}, read_json(path, "--save-path"), where)["epochs"]
    if not 0 < epochs <= MOST_EPOCHS:
        raise InputError(f"{where} epochs", epochs, "is no number of epochs; the file is damaged, delete it")
    return epochs


def earlier_result(path: Path) -> dict[str, Any]:
    """The result of an earlier quickstart."""
    found: dict[str, Any] = checked(_RESULT, read_json(path, "--save-path"), f"--save-path {path}")
    return found


# What is shown of an earlier result.
_RESULT = {
    "verifier": str, "verifier_folder": str, "method": str, "workload": str, "acceptance_length": dict[str, float],
    "speedup": float, "identical": int, "heldout_prompts": int, "checkpoint": str, "dtype": str, "machine": str,
    "tokens_per_second": {"plain": float, "draft": float}, "failures": list[str],
    "float32": {"same_rounds_as_one_pass": int}, "served_dtype": {"identical": int, "ties": int, "mismatches": int},
}  # fmt: skip
_TRAIN_DEFAULTS = {
    field.name: str(field.default)
    for field in dataclasses.fields(TrainSettings)
    if field.default is not dataclasses.MISSING
}


def _measure(run: Run, checkpoint: Path, heldout: list) -> dict[str, Any]:
    settings = run.settings
    facts = [heldout, settings.max_new_tokens, run.dtype_name, TIE_CEILING, TIE_RULE, RESULT_FORMAT]
    record = checkpoint.parent / f"results-{digest_of(facts)}.json"
    if record.is_file():
        say("      done before")
        return earlier_result(record)
    sampling = SamplingSettings(max_new_tokens=settings.max_new_tokens)
    exact = _exactness(run, checkpoint, heldout, sampling)
    pair = _pair(run, checkpoint, run.dtype_name)
    prompts = encode_all(pair.verifier, heldout, pair.mode)
    speed = prove_by_decoding(pair, prompts, EXACT_K, sampling, batch_size=1, ks=SHOWN_KS)
    result = {
        "verifier": settings.verifier_name_or_path,
        "verifier_folder": run.verifier_folder,
        "method": settings.method,
        "workload": settings.workload,
        "acceptance_length": {k: counts["acceptance_length"] for k, counts in speed["one_pass"].items()},
        "speedup": speed["speedup"],
        "identical": exact["identical"],
        "heldout_prompts": len(prompts),
        "checkpoint": str(checkpoint),
        "dtype": run.dtype_name,
        "training": read_summary(checkpoint.parent, "--save-path").to_dict(),
        "tokens_per_second": {"plain": speed["plain_tokens_per_second"], "draft": speed["draft_tokens_per_second"]},
        "float32": exact,
        "served_dtype": speed,
        "failures": [
            *(f"float32: {line}" for line in exact["failures"]),
            *(f"{run.dtype_name}: {line}" for line in speed["failures"]),
        ],
        "machine": machine_description(pair.verifier.device),
        "settings": resolved(settings),
    }
    write_json(record, result)
    return result


def _pair(run: Run, checkpoint: Path, dtype: Dtype) -> Pair:
    settings = CheckpointSettings(
        checkpoint=checkpoint, verifier_name_or_path=run.verifier_folder, dtype=dtype, device=run.settings.device,
        **run.origin(),
    )  # fmt: skip
    return load_pair(settings)


def _exactness(run: Run, checkpoint: Path, heldout: list, sampling: SamplingSettings) -> dict[str, Any]:
    """The float32 proof: identical tokens, and one-pass acceptance equal to the decoding loop's, round by round."""
    pair = _pair(run, checkpoint, "float32")
    prompts = encode_all(pair.verifier, heldout, pair.mode)
    with progress("float32 proof", 2 * len(prompts)) as advance:
        plain = DecodingEngine(pair.verifier, None, 0, sampling).generate(prompts, 16, on_done=advance)
        with_draft = DecodingEngine(pair.verifier, pair.draft, EXACT_K, sampling).generate(prompts, 16, on_done=advance)
    outcomes = one_pass(pair, plain, [EXACT_K])
    identical = sum(a.tokens == b.tokens for a, b in zip(plain, with_draft, strict=True))
    return {
        "failures": proof_failures(len(prompts), len(prompts) - identical, outcomes, with_draft, EXACT_K, exact=True),
        "identical": identical,
        "same_rounds_as_one_pass": num_same_rounds(outcomes, with_draft, EXACT_K),
        "acceptance_length": AcceptanceCounts.of(
            [r for reply in with_draft for r in reply.rounds], EXACT_K
        ).acceptance_length,
    }
