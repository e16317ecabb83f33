"""A worker: blockdraft's training step on random states, forward and backward.

`python ours.py CASE [plain] [head]`: plain takes the reference implementations (whole logits, one dense mask), head measures head and loss
alone on given hidden states.
"""

from __future__ import annotations

import dataclasses
import sys

from protocol import (
    BLOCK,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    MASK,
    PROMPT,
    TAPS,
    Case,
    serve,
)

from blockdraft.runtime import prepare_environment

prepare_environment()

import torch  # noqa: E402

from blockdraft.data.packing import pack_row  # noqa: E402
from blockdraft.draft_config import DraftConfig  # noqa: E402
from blockdraft.losses.objective import Objective  # noqa: E402
from blockdraft.losses.plain import plain_head_loss  # noqa: E402
from blockdraft.models import block_draft  # noqa: E402
from blockdraft.ops.anchors import choose_anchors  # noqa: E402
from blockdraft.ops.attention import plain_attention  # noqa: E402
from blockdraft.presets import PRESETS  # noqa: E402
from blockdraft.records import Example  # noqa: E402
from blockdraft.training import step as step_module  # noqa: E402
from blockdraft.training.hidden_states import ExampleStates  # noqa: E402


def draft_config(case: Case) -> DraftConfig:
    components = dataclasses.asdict(PRESETS[case.method].components)
    return DraftConfig(
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=INTERMEDIATE,
        rms_norm_eps=1e-5,
        vocab_size=case.vocab,
        draft_vocab_size=case.vocab,
        target_layer_ids=TAPS,
        **components,
        markov_rank=0 if components["sequential_head"] == "none" else 256,
        standardize_taps=False,
        block_size=BLOCK,
        mask_token_id=MASK,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        max_position_embeddings=8192,
        windows=(None,) * LAYERS,
        causal=(False,) * LAYERS,
    )


def use_plain_twins() -> None:
    """Whole logits and one dense attention mask, for the same step."""
    step_module.chunked_head_loss = plain_head_loss

    def dense(blocks, _row_length, _block_size, window, causal):
        return lambda *args, **kwargs: plain_attention(*args, **kwargs, blocks=blocks, window=window, causal=causal)

    block_draft.training_attention = dense


def main() -> None:
    case = Case.from_argv()
    if "plain" in sys.argv:
        use_plain_twins()
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    table = (0.02 * torch.randn(case.vocab, HIDDEN)).to(dtype)
    draft = block_draft.BlockDraft(draft_config(case))
    draft.share(table.__getitem__, table)
    draft.initialise(0)
    tokens = torch.randint(5, case.vocab, (case.seq_len,)).tolist()
    row = pack_row([Example.of_reply("row", tokens[:PROMPT], tokens[PROMPT:], "length")])
    states = ExampleStates(
        taps=torch.randn(case.seq_len, len(TAPS), HIDDEN).to(dtype),
        greedy=torch.randint(case.vocab, (case.seq_len,)),
        final=torch.randn(case.seq_len, HIDDEN).to(dtype),
    )
    weighting = "dpace" if case.loss == "ce" else "fixed-exp-decay"
    objective = Objective({case.loss: 1.0}, weighting)
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(case.anchors, BLOCK, HIDDEN).to(dtype).requires_grad_()

    def head() -> float:
        given.grad = None
        blocks = choose_anchors(row.loss_mask, row.lengths, case.anchors, generator)
        hidden = draft.predicted(given)[: len(blocks)]
        targets = step_module.block_targets(states.greedy, blocks, hidden.shape[1])
        outcome = step_module.chunked_head_loss(hidden, table, targets, objective)
        outcome.loss.backward()
        return float(outcome.loss.detach())

    def step() -> float:
        draft.zero_grad(set_to_none=True)
        blocks = choose_anchors(row.loss_mask, row.lengths, case.anchors, generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            outcome = step_module.row_loss(draft, row, [states], blocks, objective)
        outcome.loss.backward()
        return float(outcome.loss.detach())

    serve(head if "head" in sys.argv else step)


if __name__ == "__main__":
    main()
