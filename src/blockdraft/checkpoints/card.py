"""A model card: Hugging Face metadata and a page whose every figure is read from a file of the run.

What no file states is said to be "not recorded". Totals are sums of the counts that the page shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from blockdraft.contract import Contract
from blockdraft.errors import BlockdraftError

UNKNOWN = "not recorded"
MARK = "<!-- written by `blockdraft card`; every figure is read from a file of the run -->"
_HYPERPARAMETERS = (
    "speculator_type", "epochs", "total_seq_len", "max_anchors", "optimizer", "lr", "muon_lr", "weight_decay",
    "scheduler_type", "scheduler_warmup_ratio", "max_grad_norm", "grad_accum", "noise_std", "loss_fn",
    "per_position_loss_weight", "dpace_alpha", "train_data_ratio", "dtype", "seed",
)  # fmt: skip
_CELLS = {
    "suite": ("suite",), "draft": ("draft",), "K": ("k", "num_speculative_tokens"), "concurrency": ("concurrency",),
    "prompts": ("prompts", "num_prompts", "requests"), "output tokens": ("output_tokens",),
    "tokens/s": ("tokens_per_second", "output_tokens_per_second"), "speedup": ("speedup",),
    "acceptance length": ("acceptance_length",), "looping": ("looping", "looping_share"), "failures": ("failures",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a card is written from.

    Attributes:
        commands: the command that serves the draft, by its K.
        data: record of the data folder; empty where it is not there.
        validations: what `val_metrics.json` or the run's summary hold, in order.
        bench: its description; `cells`, a result each.
    """

    name: str
    contract: Contract
    parameters: int
    commands: Mapping[int, str]
    base_model: str | None
    license: str | None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    validations: Sequence[Mapping[str, Any]] = ()
    bench: Mapping[str, Any] = field(default_factory=dict)
    cells: Sequence[Mapping[str, Any]] = ()
    not_checked: Sequence[str] = ()

    @property
    def unknown(self) -> list[str]:
        """What no file of the run states."""
        stated = {
            "license": self.license, "base model": self.base_model, "training records": self.provenance.get("settings"),
            "data": self.data, "validation": self.validations, "benchmarks": self.cells,
        }  # fmt: skip
        return [name for name, value in stated.items() if not value]


def metadata(facts: CardFacts) -> ModelCardData:
    """The YAML block on top of a card."""
    method = facts.contract.draft.method
    return ModelCardData(
        license=facts.license,
        base_model=facts.base_model,
        library_name="vllm",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", "block-diffusion", method, "blockdraft"],
        datasets=_hub_datasets(facts.data) or None,
        model_name=facts.name,
    )


def _hub_datasets(data: Mapping[str, Any]) -> list[str]:
    """Data sets of the hub: sources with a revision, at the place that the record names."""
    facts = data.get("facts", {}).get("sources", {})
    return sorted(
        str(counts["location"])
        for name, counts in data.get("sources", {}).items()
        if "location" in counts and isinstance(facts, dict) and (facts.get(name) or {}).get("revision")
    )


def render(facts: CardFacts) -> str:
    """The whole card.

    Raises:
        BlockdraftError: the card would not say what it was given, as Hugging Face reads it.
    """
    stated = metadata(facts)
    sections = (_head, _usage, _draft, _data, _training, _validation, _benchmarks, _limits, _attribution)
    body = "\n\n".join("\n".join(section(facts)) for section in sections)
    text = f"---\n{stated.to_yaml()}\n---\n\n{body}\n"
    if ModelCard(text).data.to_dict() != stated.to_dict():
        raise BlockdraftError("the card's metadata do not survive Hugging Face's own reader; report this as a bug")
    return text


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in lines]


def _head(facts: CardFacts) -> list[str]:
    verifier = facts.base_model or facts.contract.verifier.architecture
    draft = facts.contract.draft
    return [
        f"# {facts.name}", "", MARK, "",
        f"A {draft.method} draft model for speculative decoding of {verifier}. It reads hidden states of the verifier "
        f"at {len(draft.target_layer_ids)} depths and proposes up to {draft.num_speculative_tokens} tokens in one "
        "forward pass. "
        "The verifier accepts the longest prefix that it agrees with: the text stays the verifier's own.",
    ]  # fmt: skip


def _usage(facts: CardFacts) -> list[str]:
    lines = ["## Usage", "", '```bash\npip install "blockdraft[serve]"\n```']
    for index, (k, command) in enumerate(facts.commands.items()):
        why = "trained number" if index == 0 else "fewer: often faster with many requests at once"
        lines += ["", f"K = {k} ({why}):", "", f"```bash\n{command}\n```"]
    lines += ["", "`model` is the folder of this draft, or its hub id."]
    return [*lines, "`blockdraft serve FOLDER --k K` checks draft and verifier first and runs the same command."]


def _draft(facts: CardFacts) -> list[str]:
    contract, draft = facts.contract, facts.contract.draft
    rows = {
        "method": draft.method,
        "parameters": f"{facts.parameters:,}",
        "layers, hidden size": f"{draft.num_layers}, {draft.hidden_size}",
        "block size, proposed tokens": f"{draft.block_size}, {draft.num_speculative_tokens}",
        "target layers": ", ".join(map(str, draft.target_layer_ids)) + f" of {contract.verifier.num_layers}",
        "draft vocabulary": f"{draft.draft_vocab_size:,} of {draft.vocab_size:,}",
        "mask token": draft.mask_token_id,
        "windows": ", ".join("full" if each is None else f"{each:,}" for each in draft.windows),
        "verifier": f"{facts.base_model or contract.verifier.name}, {contract.verifier.architecture}",
        "verifier revision": contract.verifier.revision or UNKNOWN,
        "compute dtype": contract.compute_dtype,
    }
    return ["## Draft", "", *table(("", ""), rows.items())]


def _data(facts: CardFacts) -> list[str]:
    lines = ["## Data", ""]
    sources = facts.data.get("sources")
    if not sources:
        return [*lines, f"Sources and counts: {UNKNOWN}. {_trained_on(facts)}"]
    columns = ("read", "kept", "documents")
    counts = [[each.get(name, 0) for name in columns] + [each["tokens"]["learned"]] for each in sources.values()]
    rows = [[name, *(f"{n:,}" for n in row)] for name, row in zip(sources, counts, strict=True)]
    total = ["all", *(f"{sum(column):,}" for column in zip(*counts, strict=True))]
    verifier = facts.data.get("facts", {}).get("verifier")
    author = "the verifier itself" if verifier else "others than the verifier, or unknown"
    return [
        *lines, *table(("source", "rows read", "kept", "examples", "supervised tokens"), [*rows, total]),
        "", f"Responses were written by {author}. {_trained_on(facts)}",
    ]  # fmt: skip


def _trained_on(facts: CardFacts) -> str:
    counts = [facts.provenance.get(f"{side}_documents") for side in ("train", "validation")]
    train, held = (f"{count:,}" if isinstance(count, int) else UNKNOWN for count in counts)
    return f"Examples trained on: {train}; held out for validation: {held}."


def _training(facts: CardFacts) -> list[str]:
    provenance, settings = facts.provenance, facts.provenance.get("settings") or {}
    rows = {name.replace("_", " "): settings[name] for name in _HYPERPARAMETERS if settings.get(name) is not None}
    rows |= {
        "step": _of(provenance, "step", "total_steps"),
        "examples seen": provenance.get("documents_seen", UNKNOWN),
        "date": provenance.get("date", UNKNOWN),
        "hardware": provenance.get("machine", UNKNOWN),
        "processes": facts.state.get("world_size", UNKNOWN),
        "versions": _pairs({"blockdraft": provenance.get("blockdraft"), **(provenance.get("versions") or {})}),
    }
    command = provenance.get("command")
    shown = ["", f"```bash\n{command}\n```"] if command else ["", f"Command: {UNKNOWN}."]
    return ["## Training", "", *table(("", ""), rows.items()), *shown]


def _of(stated: Mapping[str, Any], part: str, whole: str) -> str:
    return f"{stated[part]:,} of {stated[whole]:,}" if part in stated and whole in stated else UNKNOWN


def _pairs(stated: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in stated.items() if value) or UNKNOWN


def _validation(facts: CardFacts) -> list[str]:
    lines = ["## Validation", ""]
    if not facts.validations:
        return [*lines, f"{UNKNOWN.capitalize()}."]
    rows = [
        (
            each.get("step", UNKNOWN),
            _shown(each.get("acceptance_length"), ".3f"),
            _shown(each.get("acceptance_rate"), ".1%"),
        )
        for each in facts.validations
    ]
    return [
        *lines, "Exact acceptance on the held-out examples, in the verifier's full vocabulary, "
        f"K = {facts.contract.draft.num_speculative_tokens}.", "",
        *table(("step", "acceptance length", "acceptance rate"), rows),
    ]  # fmt: skip


def _benchmarks(facts: CardFacts) -> list[str]:
    lines = ["## Benchmarks", ""]
    if not facts.cells:
        return [*lines, f"{UNKNOWN.capitalize()}."]
    found = {title: [_pick(cell, names) for cell in facts.cells] for title, names in _CELLS.items()}
    shown = {title: values for title, values in found.items() if any(value is not None for value in values)}
    absent = {"draft": "none", "K": "", "speedup": "", "acceptance length": ""}
    columns = [
        [absent.get(title, UNKNOWN) if value is None else _shown(value, ".2f") for value in values]
        for title, values in shown.items()
    ]
    rows = zip(*columns, strict=True)
    machine = facts.bench.get("machine") or UNKNOWN
    versions = facts.bench.get("versions")
    return [
        *lines, *table(list(shown), rows), "",
        f"Hardware: {machine}. Versions: {_pairs(versions) if isinstance(versions, dict) else UNKNOWN}. "
        "A speedup below 1 is a slowdown.",
    ]  # fmt: skip


def _pick(cell: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The value of a cell under one of the names; of a value with an interval, its middle."""
    value = next((cell[name] for name in names if cell.get(name) is not None), None)
    return value.get("mean", value.get("value")) if isinstance(value, dict) else value


def _shown(value: Any, form: str) -> str:
    if value is None:
        return UNKNOWN
    return format(value, form) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _limits(facts: CardFacts) -> list[str]:
    draft = facts.contract.draft
    lines = [
        "## Limits", "",
        "- The draft works with the verifier it was trained for, not with fine-tunes of it: `blockdraft check` "
        "compares both.",
        f"- It proposes at most {draft.num_speculative_tokens} tokens a round.",
        "- Acceptance depends on prompts: text unlike the training data is accepted less, and many requests at once "
        "can make a draft slower than none.",
    ]  # fmt: skip
    if draft.reduced:
        lines.append(f"- It never proposes {draft.vocab_size - draft.draft_vocab_size:,} of the verifier's tokens.")
    lines += [f"- Not checked when this card was written: {each}" for each in facts.not_checked]
    return lines


def _attribution(facts: CardFacts) -> list[str]:
    base = facts.base_model or f"a verifier whose hub id is {UNKNOWN}"
    return [
        "## License and attribution", "",
        f"License of the draft: {facts.license or UNKNOWN}. Trained against {base}, whose license applies to it; "
        "a reduced vocabulary carries rows of its output matrix. Made with blockdraft.",
    ]  # fmt: skip
