"""Memory of a trainer whose hidden states come ready, beside verifiers of several sizes that are never loaded.

    python benchmarks/trainer_memory.py                                  # shapes of 4B and 12B, two minutes
    python benchmarks/trainer_memory.py --sizes 4B 12B 31B --out docs/results.md

The verifier's folder holds what a trainer reads: embedding (which is also the output head) and norms, of random
numbers; all other tensors are absent. Hidden states on disk are random, too. Each size is measured in a process of its
own: parts are read, a draft and AdamW are made, two updates are taken. Peaks are of the whole process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import markdown_table, today, write_section

sys.path.insert(0, str(Path(__file__).parent / "steps"))

from protocol import resident

from blockdraft.runtime import machine_description, prepare_environment

prepare_environment()

import torch  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, Gemma4TextConfig, PreTrainedTokenizerFast  # noqa: E402

from blockdraft.records import Example  # noqa: E402
from blockdraft.settings import TrainSettings  # noqa: E402
from blockdraft.training.hidden_state_files import HiddenStateFiles  # noqa: E402
from blockdraft.training.hidden_states import InProcess  # noqa: E402
from blockdraft.training.plan import TrainingPlan  # noqa: E402
from blockdraft.training.trainer import Trainer  # noqa: E402
from blockdraft.verifiers.base import States  # noqa: E402
from blockdraft.verifiers.parts import read_parts  # noqa: E402

GIB, PATTERN = 2**30, 2**22  # numbers of a random pattern that fills large tensors
ADAMW = 16  # bytes of a trained number: float32 weight, gradient and two moments
TAPS, EXAMPLES, LENGTH, ROW, ANCHORS = 3, 8, 128, 512, 32
COLUMNS = ["verifier", "all of it, bf16", "embedding and head", "draft: weights, gradients, moments", "states kept",
           "imports", "parts read", "peak of an update", "s / update"]  # fmt: skip


@dataclass(frozen=True)
class Size:
    """Widths of a verifier after Gemma's shapes, and of the draft that is trained for it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    draft_layers: int
    draft_intermediate: int


SIZES = {
    "tiny": Size(2_000, 64, 128, 4, 4, 2, 1, 64),
    "4B": Size(262_144, 2560, 10_240, 34, 8, 4, 1, 5_120),
    "12B": Size(262_144, 3840, 15_360, 48, 16, 8, 1, 3_840),
    "31B": Size(262_144, 5376, 21_504, 60, 32, 16, 1, 5_376),
}


def config_of(size: Size) -> Gemma4TextConfig:
    shape = {name: value for name, value in dataclasses.asdict(size).items() if not name.startswith("draft_")}
    return Gemma4TextConfig(**shape, head_dim=256, hidden_size_per_layer_input=0, final_logit_softcapping=30.0)


def whole_model(config: Gemma4TextConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def write_verifier(size: Size, folder: Path) -> None:
    """A folder without the matrices of the layers; large tensors repeat a random pattern."""
    config = config_of(size)
    config.architectures = ["Gemma4ForCausalLM"]
    config.save_pretrained(folder)
    words = {word: index for index, word in enumerate(["<pad>", "<end>", "<bos>", *(f"w{i}" for i in range(500))])}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(folder)
    parameters = dict(whole_model(config).named_parameters())
    kept = {name: p for name, p in parameters.items() if p.ndim == 1 or name.endswith("embed_tokens.weight")}
    header, end = {}, 0
    for name, parameter in kept.items():
        offsets = [end, end + 2 * parameter.numel()]
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header).encode()
    draw = torch.Generator().manual_seed(0)
    pattern = (0.02 * torch.randn(PATTERN, generator=draw)).bfloat16().view(torch.uint8).numpy().tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for parameter in kept.values():
            left = 2 * parameter.numel()
            if parameter.ndim == 1:
                pieces = [torch.ones(parameter.shape, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()]
            else:
                pieces = [pattern] * (left // len(pattern)) + [pattern[: left % len(pattern)]]
            file.writelines(pieces)


def examples_of() -> list[Example]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 500, (EXAMPLES, LENGTH), generator=draw).tolist()
    return [Example.of_reply(f"example{i}", row[:8], row[8:], "length") for i, row in enumerate(ids)]


def settings_of(size: Size, folder: Path) -> TrainSettings:
    return TrainSettings(
        verifier_name_or_path=str(folder / "verifier"), dtype="bfloat16", device="cpu", data_path=folder,
        save_path=folder / "run", hidden_states_path=folder / "states", on_missing="raise", logger="none",
        optimizer="adamw", num_taps=TAPS, num_layers=size.draft_layers, intermediate_size=size.draft_intermediate,
        total_seq_len=ROW, max_anchors=ANCHORS, train_data_ratio=0.8,
    )  # fmt: skip


def write_states(size: Size, folder: Path) -> None:
    """Hidden states of all examples, as a server would have made them."""
    parts: Any = read_parts(str(folder / "verifier"), torch.bfloat16, "cpu")
    draw = torch.Generator().manual_seed(2)

    def states(sequences: Sequence[Tensor], taps: Sequence[int], _: object) -> list[States]:
        shapes = [(len(sequence), len(taps), size.hidden_size) for sequence in sequences]
        drawn = [torch.randn(shape, generator=draw).bfloat16() for shape in shapes]
        return [States(taps_TLE, parts.normed(taps_TLE[:, -1])) for taps_TLE in drawn]

    parts.states = states
    settings = settings_of(size, folder)
    plan = TrainingPlan(dataclasses.replace(settings, hidden_states_path=None), parts, examples_of())
    taps = plan.config.target_layer_ids
    HiddenStateFiles(folder / "states", InProcess(parts, taps)).prepare(examples_of())


def measure(size: Size, folder: Path) -> dict[str, float]:
    """Memory of a trainer, in GiB, and seconds of an update."""
    imports = resident("VmRSS")
    settings = settings_of(size, folder)
    parts = read_parts(settings.verifier_name_or_path, torch.bfloat16, "cpu")
    read = resident("VmRSS")
    trainer = Trainer.fresh(TrainingPlan(settings, parts, examples_of()))
    seconds = trainer.seconds_per_step(1)
    trained = sum(parameter.numel() for parameter in trainer.draft.parameters())
    states = trainer.plan.states.provider.bytes_per_token * EXAMPLES * LENGTH
    return {"imports": imports, "read": read, "head": parts.head_VE.nbytes / GIB, "draft": trained * ADAMW / GIB,
            "states": states / GIB, "peak": resident("VmHWM"), "seconds": seconds}  # fmt: skip


def row_of(name: str, found: dict[str, float]) -> list[str]:
    whole = sum(p.numel() for p in whole_model(config_of(SIZES[name])).parameters()) * 2 / GIB
    cells = [found[key] for key in ("head", "draft", "states", "imports", "read", "peak", "seconds")]
    return [f"{name} ({SIZES[name].hidden_size:,} x {SIZES[name].num_hidden_layers})", f"{whole:.1f}",
            *(f"{cell:.2f}" for cell in cells)]  # fmt: skip


def in_own_process(what: str, name: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--only", what, "--sizes", name, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["4B", "12B"])
    parser.add_argument("--out", type=Path, help="file whose section trainer-memory is replaced by the table")
    parser.add_argument("--only", choices=["write", "measure"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        size = SIZES[options.sizes[0]]
        if options.only == "measure":
            print(json.dumps(measure(size, options.folder)))
            return
        (options.folder / "verifier").mkdir()
        write_verifier(size, options.folder / "verifier")
        write_states(size, options.folder)
        print("{}")
        return
    rows = []
    for name in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            in_own_process("write", name, Path(folder))
            rows.append(row_of(name, in_own_process("measure", name, Path(folder))))
    widths = "; ".join(f"{n}: {SIZES[n].draft_layers} layer of {SIZES[n].draft_intermediate:,}" for n in options.sizes)
    command = f"python benchmarks/trainer_memory.py --sizes {' '.join(options.sizes)}"
    heading = f"`{command}`, {today()}; {machine_description()}."
    notes = f"GiB. Rows of {ROW} tokens, {ANCHORS} anchors, {TAPS} taps; AdamW. Drafts: {widths}."
    text = f"{heading}\n{notes}\n\n{markdown_table(COLUMNS, rows)}"
    print(text)
    if options.out:
        write_section(options.out, "trainer-memory", text)


if __name__ == "__main__":
    main()
