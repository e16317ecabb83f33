"""Attention with a soft cap and sinks against the formulas of transformers' eager functions, at awkward sizes."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from blockdraft.verifiers import attention


def tensors(width: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(width)
    query = torch.randn(2, 6, width, 8, generator=generator)
    key, value = (torch.randn(2, 2, keys, 8, generator=generator) for _ in range(2))
    seen = torch.rand(2, 1, width, keys, generator=generator) > 0.4
    seen[..., 0] = True
    return query, key, value, seen


@pytest.mark.parametrize(("width", "keys"), [(1, 1), (1, 7), (5, 9), (33, 64)])
@pytest.mark.parametrize("at_once", [1, 200, 2**25])
def test_soft_cap_and_sinks(monkeypatch: pytest.MonkeyPatch, width: int, keys: int, at_once: int) -> None:
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", at_once)
    query, key, value, seen = tensors(width, keys)
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    module = torch.nn.Module()
    module.num_key_value_groups, module.training = 3, False
    module.sinks = torch.linspace(-2, 2, 6)
    capped, _ = gemma2_attention(module, query, key, value, added, scaling=0.3, softcap=1.5)
    with_sinks, _ = gpt_oss_attention(module, query, key, value, added, scaling=0.3, dropout=0.0)
    for mask in (seen, added):
        found, _ = attention.folded_attention(module, query, key, value, mask, scaling=0.3, softcap=1.5)
        torch.testing.assert_close(found, capped)
        found, _ = attention.folded_attention(module, query, key, value, mask, scaling=0.3, s_aux=module.sinks)
        torch.testing.assert_close(found, with_sinks)


def test_without_a_mask_it_is_causal() -> None:
    query, key, value, _ = tensors(9, 9)
    whole = attention.plain_attention(query, key, value, None, 0.3, softcap=1.5)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    torch.testing.assert_close(whole, attention.plain_attention(query, key, value, causal, 0.3, softcap=1.5))
