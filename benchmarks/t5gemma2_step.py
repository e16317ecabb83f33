"""Memory and time of one training step of a DFlare draft beside a T5Gemma 2 1B-1B of random weights.

    python benchmarks/t5gemma2_step.py [--dtype bfloat16] [--device cuda] [--out docs/results.md]

The real shapes: width 1152, 26 encoder and 26 decoder layers, a vocabulary of 262,144; a source of 2,048 tokens, a
target of 1,024; a draft of 6 layers with 8 taps, blocks of 8, 256 anchors and a vocabulary of 32,000. A first step is
not counted. On CPUs the last table line is an estimate of the same step on a GPU in bfloat16: weights, gradients
and moments are counted exactly, what is above them is measured here and halved where it was measured in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from report import markdown_table, today, write_section

sys.path.insert(0, str(Path(__file__).parent / "steps"))

from protocol import resident

from blockdraft.runtime import machine_description, prepare_environment, resolve_device

prepare_environment()

import torch  # noqa: E402
from transformers import T5Gemma2Config, T5Gemma2ForConditionalGeneration  # noqa: E402

from blockdraft.data.packing import pack_row  # noqa: E402
from blockdraft.draft_config import DraftConfig  # noqa: E402
from blockdraft.losses.objective import Objective  # noqa: E402
from blockdraft.models.block_draft import BlockDraft  # noqa: E402
from blockdraft.ops.anchors import choose_anchors  # noqa: E402
from blockdraft.presets import PRESETS  # noqa: E402
from blockdraft.records import Example  # noqa: E402
from blockdraft.training.hidden_states import InProcess  # noqa: E402
from blockdraft.training.step import row_loss  # noqa: E402
from blockdraft.verifiers.encoder_decoder import EncoderDecoderVerifier  # noqa: E402

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS = 262_144, 1152, 4, 1, 256, 6912, 26
SOURCE, TARGET, ANCHORS, DRAFT_VOCABULARY, DRAFT_LAYERS = 2048, 1024, 256, 32_000, 6
TAPS, BLOCK, MASK = (2, 5, 8, 11, 14, 17, 20, 22), 8, 4
GIB = 2**30
GPU_GIB = 16


def make_verifier(dtype: torch.dtype, device: torch.device) -> EncoderDecoderVerifier:
    """The model, built without weights and filled with small random ones; the vision tower is as small as can be."""
    text = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INTERMEDIATE, "head_dim": HEAD_DIM,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "query_pre_attn_scalar": 256, "sliding_window": 512, "max_position_embeddings": 32_768,
    }  # fmt: skip
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
              "image_size": 4, "patch_size": 2}  # fmt: skip
    config = T5Gemma2Config(
        encoder={"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}, decoder=text
    )
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = T5Gemma2ForConditionalGeneration(config).to(device)
    finally:
        torch.set_default_dtype(previous)
    tokenizer = SimpleNamespace(get_vocab=dict, eos_token_id=1)
    return EncoderDecoderVerifier(model, tokenizer, "random-1b-1b")


def make_draft(verifier: EncoderDecoderVerifier) -> BlockDraft:
    draft = BlockDraft(
        DraftConfig(
            hidden_size=WIDTH,
            num_layers=DRAFT_LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            intermediate_size=INTERMEDIATE,
            rms_norm_eps=1e-6,
            vocab_size=VOCABULARY,
            draft_vocab_size=DRAFT_VOCABULARY,
            target_layer_ids=TAPS,
            **dataclasses.asdict(PRESETS["dflare"].components),
            markov_rank=0,
            standardize_taps=False,
            block_size=BLOCK,
            mask_token_id=MASK,
            rope_parameters=verifier.rope_parameters(),
            max_position_embeddings=verifier.context_length,
            windows=(None,) * DRAFT_LAYERS,
            causal=(False,) * DRAFT_LAYERS,
        )
    ).to(verifier.device)
    assert draft.vocabulary is not None
    draft.vocabulary.keep(torch.arange(DRAFT_VOCABULARY, device=verifier.device))
    draft.share(verifier.embed, verifier.head_VE)
    draft.initialise(0)
    return draft


class Memory:
    """Peak of memory in GiB since it was last forgotten: of a CUDA GPU, or of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def forget(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / GIB
        return resident("VmHWM")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=1, help="steps after the first")
    parser.add_argument("--out", type=Path, help="file whose section t5gemma2-step is replaced by the table")
    options = parser.parse_args()
    dtype, device = getattr(torch, options.dtype), torch.device(resolve_device(options.device))
    torch.manual_seed(0)
    memory = Memory(device)
    verifier = make_verifier(dtype, device)
    draft = make_draft(verifier)
    optimizer = torch.optim.AdamW(draft.parameters(), 6e-4)
    draw = torch.Generator().manual_seed(0)
    source, target = (torch.randint(1000, VOCABULARY, (n,), generator=draw).tolist() for n in (SOURCE, TARGET - 1))
    example = Example.of_reply("row", [2], target, "length", source_ids=source)
    states = InProcess(verifier, TAPS, with_final=True)
    objective, row = Objective({"kl": 1.0}, "fixed-exp-decay"), pack_row([example])

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        blocks = choose_anchors(row.loss_mask, row.lengths, ANCHORS, draw)
        with torch.autocast(verifier.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            outcome = row_loss(draft, row, states.get([example]), blocks, objective, verifier.logit_softcap)
        outcome.loss.backward()
        optimizer.step()

    step()  # makes the moments
    memory.forget()
    start = time.perf_counter()
    for _ in range(options.steps):
        step()
    seconds = (time.perf_counter() - start) / options.steps
    report(options, verifier, draft, memory.peak(), seconds)


def report(
    options: argparse.Namespace, verifier: EncoderDecoderVerifier, draft: BlockDraft, peak: float, seconds: float
) -> None:
    size = 4 if options.dtype == "float32" else 2
    parameters = sum(parameter.numel() for parameter in verifier.model.parameters())
    trained = sum(parameter.numel() for parameter in draft.parameters())
    head = DRAFT_VOCABULARY * WIDTH
    held = (parameters * size + head * size + trained * 16) / GIB  # float32 weights, gradients and two moments
    above = peak - held
    rows = [
        ["verifier", f"{parameters / 1e6:,.0f} M parameters", f"{parameters * size / GIB:.2f}"],
        ["draft", f"{trained / 1e6:,.0f} M parameters: weights, gradients, moments", f"{trained * 16 / GIB:.2f}"],
        ["draft's head", f"{DRAFT_VOCABULARY:,} rows", f"{head * size / GIB:.2f}"],
        ["peak of a step", f"{options.dtype}, {seconds:.1f} s", f"{peak:.2f}"],
    ]
    if verifier.device.type == "cpu":
        estimate = (parameters * 2 + head * 2 + trained * 16) / GIB + above * 2 / size
        verdict = "fits" if estimate < GPU_GIB else "does not fit"
        rows.append(["estimate for a GPU", f"bfloat16; {verdict} {GPU_GIB} GB", f"{estimate:.2f}"])
    table = markdown_table(["what", "of which kind", "GiB"], rows)
    machine = machine_description(verifier.device)
    heading = f"`python benchmarks/t5gemma2_step.py {' '.join(sys.argv[1:])}`, {today()}; {machine}."
    print(f"{heading}\n\n{table}")
    if options.out:
        write_section(options.out, "t5gemma2-step", f"{heading}\n\n{table}")


if __name__ == "__main__":
    main()
