"""Every family of transformers is right in process, or rejected in one line: never wrong, and never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from blockdraft.decoding.engine import DecodingEngine, Reply
from blockdraft.decoding.one_pass import one_pass_acceptance
from blockdraft.errors import InputError
from blockdraft.records import Example
from blockdraft.settings import SamplingSettings, TrainSettings
from blockdraft.training.plan import TrainingPlan
from blockdraft.training.trainer import Trainer
from blockdraft.verifiers import proof
from blockdraft.verifiers.base import Verifier
from blockdraft.verifiers.identity import read_identity
from blockdraft.verifiers.loading import load_verifier
from conftest import MASK, random_example, tiny_tokenizer
from verifiers.families import FAMILIES, NOT_TRIED, REJECTED, RIGHT, WINDOW, Family, tiny_model
from verifiers.page import PAGE, page

PROMPTS = [random_example(length, 1, length).input_ids for length in (5, 21, 40)]
SAMPLING = SamplingSettings(max_new_tokens=24, ignore_eos=True)
NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


def saved(family: Family, folder: Path) -> str:
    tiny_model(family).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def eager(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def name_of(family: Family) -> str:
    return family.name


@pytest.mark.parametrize("family", RIGHT, ids=name_of)
def test_a_family_is_right(family: Family, tmp_path: Path) -> None:
    """Whole texts, taps, cached decoding, and a draft that is trained, decoded with and evaluated in one pass.

    And its identity is the same whether it is loaded or read from the files.
    """
    folder = saved(family, tmp_path / "verifier")
    verifier, own = load_verifier(folder, torch.float32, "cpu"), eager(folder)
    assert verifier.identity.matrices_digest is not None
    assert read_identity(folder)[0] == verifier.identity
    tokens = torch.stack([torch.tensor(random_example(100, 1, seed).input_ids) for seed in (1, 2)])
    assert tokens.shape[1] > 2 * WINDOW
    with torch.no_grad():
        outputs = own(tokens, use_cache=False, output_hidden_states=True)
    num_layers = verifier.identity.num_layers
    norm = next(getattr(own.get_decoder(), name) for name in NORMS if hasattr(own.get_decoder(), name))
    for row, states in enumerate(verifier.states(list(tokens), range(num_layers + 1))):
        close(verifier.logits(states.final), outputs.logits[row])
        for tap in range(num_layers):
            close(states.taps[:, tap], outputs.hidden_states[tap][row])
        close(norm(states.taps[:, num_layers]), outputs.hidden_states[num_layers][row])

    plain = DecodingEngine(verifier, None, 0, SAMPLING).generate(PROMPTS, 3)
    for reply in plain:
        require_greedy(own, reply)
    trainer = trained(verifier, tmp_path)
    drafted = DecodingEngine(verifier, trainer.draft, 3, SAMPLING).generate(PROMPTS, 3)
    assert [reply.tokens for reply in drafted] == [reply.tokens for reply in plain]
    texts = [Example.of_reply(str(reply.index), reply.prompt, reply.tokens, "length") for reply in plain]
    outcomes = one_pass_acceptance(verifier, trainer.draft, texts, [3])
    assert [reply.rounds for reply in drafted] == [outcome.rounds[3] for outcome in outcomes]


def close(found: Tensor, wanted: Tensor) -> None:
    assert proof.difference(found, wanted, torch.float32) < 1e-3


def require_greedy(own: PreTrainedModel, reply: Reply) -> None:
    """Each token of a reply is the model's own argmax after what stands before it, or as good as it."""
    with torch.no_grad():
        logits = own(torch.tensor([[*reply.prompt, *reply.tokens]]), use_cache=False).logits[0]
    said = logits[len(reply.prompt) - 1 : -1]
    gaps = said.max(dim=-1).values - said.gather(1, torch.tensor(reply.tokens)[:, None])[:, 0]
    assert float(gaps.max()) < 1e-3 * float(said.std())


def trained(verifier: Verifier, folder: Path) -> Trainer:
    """One step of a run on random examples, for a draft with the verifier's own widths and rotary parameters."""
    settings = TrainSettings(
        dtype="float32", data_path=folder, save_path=folder / "draft", logger="none", epochs=1.0, total_seq_len=80,
        max_anchors=8, block_size=4, mask_token_id=MASK, num_layers=1, num_taps=2,
    )  # fmt: skip
    trainer = Trainer.fresh(TrainingPlan(settings, verifier, [random_example(24 + i % 5, 6, i) for i in range(4)]))
    loss = trainer._update(0, 1.0).loss
    assert loss > 0
    return trainer


@pytest.mark.parametrize("family", REJECTED, ids=name_of)
def test_a_family_is_rejected_in_one_line(family: Family, tmp_path: Path) -> None:
    folder = saved(family, tmp_path)
    with pytest.raises(InputError) as error:
        load_verifier(folder, torch.float32, "cpu")
    assert family.rejected in str(error.value)
    assert "is not supported" in str(error.value) and "\n" not in str(error.value)


def test_every_family_of_transformers_is_in_the_table() -> None:
    tried = {family.model_type for family in FAMILIES}
    assert tried | NOT_TRIED >= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) and not tried & NOT_TRIED
    assert len({family.model_type for family in RIGHT}) >= 60
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_the_page_is_the_table() -> None:
    """Written by `python -m verifiers.page`; edit the table, never the page."""
    assert PAGE.read_text(encoding="utf-8") == page()
