"""Results for people: short tables on stdout."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text


def _console() -> Console:
    return Console(highlight=False)


def _fields(rows: dict[str, Any], title: str | None = None) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, f"{value:.3g}" if isinstance(value, float) else str(value))
    return table


def _failures(console: Console, result: dict[str, Any]) -> None:
    """What was not proved, a red line each."""
    for line in result["failures"]:
        console.print(Text(f"not proved: {line}", "bold red"))


def show_fields(result: dict[str, Any]) -> None:
    """A result as name and value; nothing where there is nothing to say."""
    if result:
        _console().print(_fields(result))


_LEVELS = {"error": "bold red", "warning": "yellow", "not checked": "dim"}


def show_check(result: dict[str, Any]) -> None:
    """What a checkpoint is, and a line for each finding."""
    console = _console()
    console.print(_fields({name: value for name, value in result.items() if name not in ("findings", "failures")}))
    show_findings(result["findings"], console)


def show_card(result: dict[str, Any]) -> None:
    """Where the card is; or why there is none."""
    console = _console()
    show_findings(result["findings"], console)
    if result["failures"]:
        console.print("no card was written: correct what contradicts itself first")
        return
    if result["dry_run"]:
        console.print(Text(result["text"]), soft_wrap=True)
    rows = {name: result[name] for name in ("card", "copied", "unknown", "pushed to")}
    console.print(_fields({name: ", ".join(v) if isinstance(v, list) else v for name, v in rows.items() if v}))
    for name, size in result["files"].items():
        console.print(f"{size:>14,}  {name}", soft_wrap=True)


def show_findings(findings: list[dict[str, str]], console: Console | None = None) -> None:
    """A line for each finding, the worst first."""
    for level, style in _LEVELS.items():
        for each in findings:
            if each["level"] == level:
                line = f"{level}: {each['check']}: {each['field']}: {each['value']}: {each['hint']}"
                (console or _console()).print(Text(line, style), soft_wrap=True)


def show_training(result: dict[str, Any]) -> None:
    """What came of a training run."""
    console = _console()
    if result.get("dry_run"):
        console.print(
            _fields({"steps": result["steps"], **result["settings"]}, "Settings of the run (nothing trained)")
        )
        return
    history = Table(title="Exact acceptance on the validation set", title_justify="left")
    for name in ("step", "acceptance length", "acceptance rate"):
        history.add_column(name, justify="right")
    for entry in result["history"]:
        history.add_row(f"{entry['step']:.0f}", f"{entry['acceptance_length']:.2f}", f"{entry['acceptance_rate']:.1%}")
    console.print(history)
    console.print(_fields({"checkpoint": result["checkpoint"], "parameters": f"{result['parameters']:,}"}))


def show_prepared(result: dict[str, Any], console: Console | None = None) -> None:
    """What became of every row of every source; or, for a preview, texts with the supervised tokens colored."""
    console = console or _console()
    if "preview" in result:
        for text in result["preview"]:
            _show_text(console, text)
        return
    table = Table(title=f"{result['documents']:,} examples in {result['folder']}", title_justify="left")
    table.add_column("source")
    for name in ("read", "kept", "examples", "supervised tokens", "of all", "cut short"):
        table.add_column(name, justify="right")
    table.add_column("left out")
    for name, counts in result["sources"].items():
        tokens = counts["tokens"]
        out = {**counts["dropped"], **counts["rejected"]}
        table.add_row(
            name,
            f"{counts['read']:,}",
            f"{counts['kept']:,}",
            f"{counts['documents']:,}",
            f"{tokens['learned']:,}",
            f"{tokens['learned'] / max(tokens['text'], 1):.0%}",
            f"{_cut_short(counts):,}",
            ", ".join(f"{n:,} {reason}" for reason, n in out.items()),
        )
    console.print(table)
    console.print(f"{result['train']:,} to train on, {result['validation']:,} to validate")
    shares = [f"the {int(size):,} most frequent are {share:.2%}" for size, share in result["draft_vocabulary"].items()]
    if result["distinct_tokens"]:
        console.print("; ".join([f"{result['distinct_tokens']:,} distinct supervised tokens", *shares]))


def _cut_short(counts: dict[str, Any]) -> int:
    """Texts cut to a limit by `prepare`; replies that `regenerate` had to end."""
    cut = counts.get("cut")
    return counts["finish"].get("length", 0) if cut is None else cut.get("texts", 0) + cut.get("sources", 0)


def _show_text(console: Console, text: dict[str, Any]) -> None:
    body = Text()
    if text["reads"] is not None:
        body.append(text["reads"], style="cyan")
        body.append("\n\n")
    for piece, supervised in text["pieces"]:
        body.append(piece, style="bold green" if supervised else "dim")
    console.print(
        Panel(body, title=f"{text['source']}, {text['tokens']} tokens; green = supervised", title_align="left")
    )


def show_evaluation(result: dict[str, Any]) -> None:
    """Acceptance by K, and what decoding proved."""
    console = _console()
    table = Table(title=f"Acceptance of {result['method']} in {result['dtype']}", title_justify="left")
    for name in ("K", "acceptance length", "acceptance rate", "rounds"):
        table.add_column(name, justify="right")
    table.add_column("accepted at position 1, 2, ...")
    for k, counts in result["acceptance"].items():
        shares = " ".join(f"{n / max(counts['rounds'], 1):.0%}" for n in counts["accepted_per_position"])
        table.add_row(
            k, f"{counts['acceptance_length']:.2f}", f"{counts['acceptance_rate']:.1%}", str(counts["rounds"]), shares
        )
    console.print(table)
    for k, proof in result.get("decoding", {}).items():
        console.print(
            _fields(_proof_rows(proof, result["prompts"]), f"Decoded with K={k}, batch {proof['batch_size']}")
        )
    _failures(console, result)
    console.print(f"{result['prompts']} prompts, {result['reply_tokens']} reply tokens; {result['machine']}")


def _proof_rows(proof: dict[str, Any], prompts: int) -> dict[str, Any]:
    return {
        "tokens/s with the draft": f"{proof['draft_tokens_per_second']:.1f}",
        "tokens/s without": f"{proof['plain_tokens_per_second']:.1f}",
        "ratio": f"{proof['speedup']:.2f}",
        "token-identical": f"{proof['identical']} of {prompts}",
        "near-ties / mismatches": f"{proof['ties']} / {proof['mismatches']}",
        "rounds equal one-pass": f"{proof['same_rounds_as_one_pass']} of {prompts}",
    }


def show_generation(result: dict[str, Any]) -> None:
    """Replies, unless they were streamed, and how fast they came."""
    console = _console()
    if not result["streamed"]:
        for index, reply in enumerate(result["replies"], start=1):
            console.print(f"[bold]{index}[/bold]", reply["text"], markup=True)
    console.print(
        f"{result['tokens']} tokens in {result['seconds']:.1f} s, {result['tokens_per_second']:.1f} tokens/s, "
        f"acceptance length {result['acceptance_length']:.2f} at K={result['k']}",
        style="dim",
    )


def show_parity(result: dict[str, Any]) -> None:
    """Each engine against the trainer's forward, stage by stage."""
    console = _console()
    table = Table(
        title=f"Parity of a {result['method']} draft in {result['dtype']}: {result['prompts']} prompts, "
        f"{result['reply_tokens']} reply tokens, vLLM {result['engine']}",
        title_justify="left",
    )
    for name in ("K", "engine", "text", "proposed tokens", "accepted tokens", "engine counters", "acceptance length"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for k, found in result["k"].items():
        for engine, stages in found["stages"].items():
            cells = [_verdict(counts) for counts in stages.values()]
            if engine == "vllm" and not found["blocks_recorded"]:
                cells[1] = "no record"
            if engine == "reference":
                cells[-1] = ""
            table.add_row(k, engine, *cells, f"{found['acceptance_length'][engine]:.3f}")
    console.print(table)
    _failures(console, result)
    verdict = "what is served is what was trained" if not result["mismatches"] else f"{result['mismatches']} mismatches"
    console.print(f"{verdict}; {result['machine']}")


def _verdict(counts: dict[str, int]) -> str:
    if counts["mismatches"]:
        return f"[bold red]{counts['mismatches']} mismatches[/bold red]"
    return f"{counts['ties']} near-ties" if counts["ties"] else "[green]equal[/green]"


def show_quickstart(result: dict[str, Any]) -> None:
    """The short table, and what to try next."""
    console = _console()
    served, exact, total = result["served_dtype"], result["float32"], result["heldout_prompts"]
    table = Table(
        title=f"{result['method']} draft for {result['verifier']}, {total} held-out prompts of {result['workload']}",
        title_justify="left",
        show_header=False,
    )
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    lengths = result["acceptance_length"]
    rate = result["tokens_per_second"]
    table.add_row("acceptance length", "   ".join(f"K={k}: {value:.2f}" for k, value in lengths.items()))
    table.add_row("tokens/s without draft", f"{rate['plain']:.1f}")
    table.add_row("tokens/s with draft, K=7", f"{rate['draft']:.1f}")
    table.add_row("ratio", f"[bold green]{result['speedup']:.2f}[/bold green]")
    table.add_row("token-identical (float32)", f"{result['identical']} of {total}")
    table.add_row(
        "one-pass = decoding (float32)", f"{exact['same_rounds_as_one_pass']} of {total} replies, round by round"
    )
    if result["dtype"] != "float32":
        table.add_row(
            f"{result['dtype']} replies",
            f"{served['identical']} identical, {served['ties']} differ first at a near-tie, "
            f"{served['mismatches']} mismatches",
        )
    table.add_row("machine", result["machine"])
    table.add_row("verifier", result["verifier_folder"])
    table.add_row("draft", result["checkpoint"])
    if "card" in result:
        table.add_row("model card", result["card"] or "none: `blockdraft check` says why")
    console.print(table)
    _failures(console, result)
    console.print("\nNext:")
    for line in next_commands(result):
        console.print(f"  {line}", soft_wrap=True)


def next_commands(result: dict[str, Any]) -> list[str]:
    """Three commands that go on from a quickstart; its draft is tried on prompts of the workload it was trained on."""
    checkpoint, program = result["checkpoint"], program_name()
    other = "dspark" if result["method"] == "dflash" else "dflash"
    return [
        f"{program} generate {checkpoint} --workload {result['workload']} --max-prompts 1 --show-drafts",
        f"{program} evaluate {checkpoint} --workload {result['workload']} --k 1 3 5 7",
        f"{program} quickstart --method {other} --workload {result['workload']}",
    ]


def program_name() -> str:
    """How to call this program from here: by its name if that is on the path, else by the path of its script."""
    if shutil.which("blockdraft"):
        return "blockdraft"
    script = Path(sys.executable).with_name("blockdraft")
    return os.path.relpath(script) if script.is_file() else f"{sys.executable} -m blockdraft.cli.main"
