"""What only a CUDA machine runs: FlexAttention compiled, backward too, and training with torch.compile.

Skipped elsewhere; `docs/cuda.md` says how to run them and what to expect.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from blockdraft.data.packing import pack_row
from blockdraft.decoding.engine import DecodingEngine
from blockdraft.decoding.one_pass import one_pass_acceptance
from blockdraft.ops.anchors import choose_anchors
from blockdraft.ops.attention import plain_attention, training_attention
from blockdraft.records import Example
from blockdraft.settings import SamplingSettings, TrainSettings
from blockdraft.training.plan import TrainingPlan
from blockdraft.training.trainer import Trainer
from blockdraft.verifiers.causal import CausalVerifier
from conftest import random_example

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize(("window", "causal"), [(None, False), (9, False), (None, True), (10, True)])
def test_compiled_flex_attention_equals_the_dense_twin(window: int | None, causal: bool) -> None:
    row = pack_row([random_example(length, start, length) for length, start in ((63, 20), (7, 2), (65, 30))])
    blocks = choose_anchors(row.loss_mask.to(DEVICE), row.lengths.to(DEVICE), max_anchors=0)
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = ((len(blocks), 8, 6, 16), *[(len(blocks), 8, 2, 16)] * 2, *[(len(row.tokens), 2, 16)] * 2)
    tensors = [torch.randn(shape, device=DEVICE, generator=generator).requires_grad_() for shape in shapes]
    fast = training_attention(blocks, len(row.tokens), 8, window, causal)(*tensors)
    plain = plain_attention(*tensors, blocks, window, causal)
    torch.testing.assert_close(fast, plain, rtol=2e-3, atol=2e-3)
    weight = torch.randn(fast.shape, device=DEVICE, generator=generator)
    found, wanted = (torch.autograd.grad((out * weight).sum(), tensors) for out in (fast, plain))
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("method", ["dflash", "dflare", "dspark"])
def test_a_compiled_run_trains_and_its_draft_is_lossless(
    tiny_verifier: CausalVerifier, tmp_path: Path, method: str
) -> None:
    verifier = CausalVerifier(copy.deepcopy(tiny_verifier.model).to(DEVICE), tiny_verifier.tokenizer, "tiny")
    settings = TrainSettings(
        dtype="float32", device=DEVICE, data_path=tmp_path, save_path=tmp_path / "run", logger="none",
        speculator_type=method, target_layer_ids=(0, 2, 4), epochs=4.0, total_seq_len=80, max_anchors=12,
        mask_token_id=100, block_size=4, compile="on",
        num_layers=2, lr=2e-3, muon_lr=4e-2,
    )  # fmt: skip
    examples = [random_example(24 + i % 5, 6 + i % 3, i) for i in range(12)]
    trainer = Trainer.prepare(TrainingPlan(settings, verifier, examples))
    trainer.run()
    prompts = [example.input_ids[:10] for example in examples[:4]]
    sampling = SamplingSettings(max_new_tokens=20, ignore_eos=True)
    plain = DecodingEngine(verifier, None, 0, sampling).generate(prompts, 4)
    drafted = DecodingEngine(verifier, trainer.draft, 3, sampling).generate(prompts, 4)
    assert [reply.tokens for reply in plain] == [reply.tokens for reply in drafted]
    texts = [Example.of_reply(str(r.index), r.prompt, r.tokens, "length") for r in plain]
    outcomes = one_pass_acceptance(verifier, trainer.draft, texts, [3])
    assert [reply.rounds for reply in drafted] == [outcome.rounds[3] for outcome in outcomes]
