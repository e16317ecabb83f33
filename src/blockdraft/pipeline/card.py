"""`blockdraft card`: complete a checkpoint's folder with logs, benchmarks and a model card, and upload it."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token

from blockdraft.checkpoints.card import MARK, CardFacts, render
from blockdraft.checkpoints.examine.facts import CARD, CheckpointFacts, read_facts, without_card
from blockdraft.checkpoints.store import CONFIG, PROVENANCE, VALIDATION, WEIGHTS, read_contract
from blockdraft.contract import Contract
from blockdraft.data.record import RECORD, read_record
from blockdraft.errors import BlockdraftError, InputError
from blockdraft.files import read_json, read_json_object, read_text, reading, reason, replacing, write_text, writing
from blockdraft.pipeline.check import check_facts
from blockdraft.pipeline.loading import chat_mode_of
from blockdraft.progress import say
from blockdraft.serving.launcher import needs_v1_runner, speculative_config, vllm_arguments
from blockdraft.settings import CardSettings
from blockdraft.settings.serving import HUB_ID
from blockdraft.training.history import SUMMARY

BENCH, CELLS = "bench.json", "results.jsonl"
LOGS, BENCHMARKS = "logs", "benchmarks"


def card(settings: CardSettings) -> dict[str, Any]:
    """Check the checkpoint, then write its card, and upload the folder where asked.

    Returns:
        The card, what was copied into the folder, and the findings of the check; `failures` where nothing was written.

    Raises:
        InputError: a checkpoint without a contract, a bench folder without results, a README of somebody else.
        BlockdraftError: the upload failed; the folder is complete.
    """
    facts = read_facts(settings.checkpoint)
    if not facts.own:
        raise InputError("checkpoint", settings.checkpoint, f"is of layout {facts.layout}; a card needs our contract")
    output = settings.output or settings.checkpoint / CARD
    _require_ours(output)
    _require_login(settings)
    checked = check_facts(without_card(facts), settings)
    result: dict[str, Any] = {
        "card": str(output), "copied": [], "unknown": [], "pushed to": None, "files": {}, "text": "",
        "dry_run": settings.dry_run, "findings": checked["findings"], "failures": checked["failures"],
    }  # fmt: skip
    if checked["failures"]:
        return result
    stated = card_facts(settings, facts, checked)
    result["text"], result["unknown"] = render(stated), stated.unknown
    if not settings.dry_run:
        result["copied"] = _complete(settings, facts)
        write_text(output, result["text"])
    if settings.push is not None:
        result["files"] = _files(settings, facts, result["text"])
        result["pushed to"] = None if settings.dry_run else _push(settings.checkpoint, settings.push)
    return result


def card_facts(settings: CardSettings, facts: CheckpointFacts, checked: dict[str, Any]) -> CardFacts:
    """What the card states, from the files of the run and the flags.

    Raises:
        InputError: one of the files is damaged.
    """
    contract = read_contract(settings.checkpoint)
    recorded = contract.verifier.name
    base = settings.base_model or (recorded if HUB_ID.fullmatch(recorded) and not Path(recorded).exists() else None)
    name = (settings.push or f"{base or contract.verifier.architecture}-{contract.draft.method}").rpartition("/")[2]
    bench, cells = _bench(settings.bench or _within(settings.checkpoint / BENCHMARKS))
    return CardFacts(
        name=name,
        contract=contract,
        parameters=checked["parameters"],
        commands=_commands(settings, contract, base or recorded),
        base_model=base,
        license=settings.license,
        provenance=facts.provenance,
        state=facts.state,
        data=_data(settings.checkpoint, facts),
        validations=_validations(settings.checkpoint, facts),
        bench=bench,
        cells=cells,
        not_checked=[
            f"{each['check']}: {each['value']}" for each in checked["findings"] if each["level"] == "not checked"
        ],
    )


def _require_ours(output: Path) -> None:
    """Reject a file that somebody wrote by hand."""
    if output.exists() and MARK not in read_text(output, "--output"):
        raise InputError("--output", output, "was not written by `blockdraft card`; move it away, or name another file")


def _require_login(settings: CardSettings) -> None:
    if settings.push is not None and not settings.dry_run and get_token() is None:
        raise InputError("--push", settings.push, "not logged in to the hub; run `hf auth login`, or try --dry-run")


def _commands(settings: CardSettings, contract: Contract, verifier: str) -> dict[int, str]:
    """The command of vLLM for the trained K, and for about half of it."""
    most = contract.draft.num_speculative_tokens
    v1_runner = needs_v1_runner(contract, cpu=False)
    options = chat_mode_of(settings.checkpoint, "trained").options()
    folder = Path(settings.push or settings.checkpoint.resolve().name)
    found = {}
    for k in dict.fromkeys((most, max(1, most // 2))):
        speculative = speculative_config(folder, contract, k, v1_runner)
        arguments = vllm_arguments(
            contract, verifier, speculative, contract.compute_dtype, "127.0.0.1", 8000, options
        )  # fmt: skip
        found[k] = ("VLLM_USE_V2_MODEL_RUNNER=0 " * v1_runner) + shlex.join(["vllm", *arguments])
    return found


def _data(checkpoint: Path, facts: CheckpointFacts) -> dict[str, Any]:
    """The record of the data: the copy in the checkpoint, or the folder that the run read."""
    stated = facts.settings.get("data_path")
    for folder in (checkpoint, *([Path(stated)] if isinstance(stated, str) else [])):
        if (folder / RECORD).is_file():
            return read_record(folder, "data")
    return {}


def _validations(checkpoint: Path, facts: CheckpointFacts) -> list[dict[str, Any]]:
    """Every validation up to the checkpoint's step: from val_metrics.json, the run's summary or the provenance."""
    found: Any = facts.provenance.get("validation")
    if (checkpoint / VALIDATION).is_file():
        found = read_json(checkpoint / VALIDATION, "checkpoint")
        found = found.get("history", found.get("validations")) if isinstance(found, dict) else found
    elif (checkpoint.resolve().parent / SUMMARY).is_file():
        found = read_json_object(checkpoint.resolve().parent / SUMMARY, "checkpoint").get("history")
    rows = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    step = facts.provenance.get("step")
    return [each for each in rows if not isinstance(step, int) or each.get("step", 0) <= step]


def _bench(folder: Path | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Description and results of a benchmark; nothing where there is none."""
    if folder is None:
        return {}, []
    lines = read_text(folder / CELLS, "--bench").splitlines()
    cells: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        with reading(folder / CELLS, f"--bench line {number}"):
            cell = json.loads(line)
        if not isinstance(cell, dict):
            raise InputError(f"--bench line {number}", line[:80], "must be one JSON object, a result")
        cells.append(cell)
    described = read_json_object(folder / BENCH, "--bench") if (folder / BENCH).is_file() else {}
    return described, cells


def _within(folder: Path) -> Path | None:
    return folder if (folder / CELLS).is_file() else None


def _additions(settings: CardSettings, facts: CheckpointFacts) -> dict[str, Path]:
    """What the run left elsewhere, by its name in the checkpoint: curves, benchmarks, summary, record of the data."""
    run, stated = settings.checkpoint.resolve().parent, facts.settings
    logs = Path(stated["log_dir"]) if isinstance(stated.get("log_dir"), str) else run / LOGS
    found = {LOGS: logs / str(stated.get("run_name", "")), SUMMARY: run / SUMMARY}
    if settings.bench is not None:
        found[BENCHMARKS] = settings.bench
    if isinstance(stated.get("data_path"), str):
        found[RECORD] = Path(stated["data_path"]) / RECORD
    own = settings.checkpoint.resolve()
    return {name: path for name, path in found.items() if path.exists() and path.resolve() != own / name}


def _complete(settings: CardSettings, facts: CheckpointFacts) -> list[str]:
    """Copy into the checkpoint what the run left elsewhere."""
    copied = _additions(settings, facts)
    for name, source in copied.items():
        target = settings.checkpoint / name
        if source.is_dir():
            with replacing(target) as temporary, writing(target):
                shutil.copytree(source, temporary, dirs_exist_ok=True)
        else:
            write_text(target, read_text(source, "checkpoint"))
    return list(copied)


def _files(settings: CardSettings, facts: CheckpointFacts, text: str) -> dict[str, int]:
    """Files of the complete folder with their sizes in bytes."""
    found = {CARD: len(text.encode())}
    for name, place in {"": settings.checkpoint, **_additions(settings, facts)}.items():
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                found.setdefault(str(Path(name) / path.relative_to(place)), path.stat().st_size)
    return dict(sorted(found.items()))


def _push(folder: Path, repository: str) -> str:
    missing = [name for name in (CONFIG, WEIGHTS, PROVENANCE) if not (folder / name).is_file()]
    if missing:
        raise BlockdraftError(f"{folder}: {', '.join(missing)}: missing; nothing was uploaded")
    say(f"blockdraft: uploading {folder} to {repository}")
    try:
        client = HfApi()
        client.create_repo(repository, private=True, exist_ok=True)
        client.upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=[".*"])
    except Exception as error:  # whatever the hub's client raises
        raise BlockdraftError(f"{repository}: not uploaded ({reason(error)}); {folder} is complete") from error
    return f"https://huggingface.co/{repository}"
