"""Saving and loading: equal after a round trip, and nothing that is saved is without effect."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.checkpoints.speculators import DIGEST
from blockdraft.checkpoints.store import CONFIG, WEIGHTS, load_draft, read_checkpoint, save_draft
from blockdraft.contract import CONTRACT_VERSION, VerifierIdentity
from blockdraft.data.packing import pack_row
from blockdraft.errors import InputError
from blockdraft.models.block_draft import BlockDraft
from blockdraft.ops.anchors import choose_anchors
from blockdraft.pipeline.loading import load_pair
from blockdraft.runtime import has_fast_bfloat16
from blockdraft.settings import CheckpointSettings
from blockdraft.training.step import positions_before
from blockdraft.verifiers.causal import CausalVerifier
from blockdraft.verifiers.loading import save_folder
from conftest import contract_of, random_example, rewrite, tiny_config, tiny_draft, tiny_verifier_of


def hidden_of(draft: BlockDraft, verifier: CausalVerifier) -> torch.Tensor:
    """Everything a draft says: hidden states, corrected logits of each slot, confidences and the map of its ids."""
    row = pack_row([random_example(30, 5, 3)])
    taps = verifier.states([row.tokens], draft.config.target_layer_ids)[0].taps
    blocks = choose_anchors(row.loss_mask, row.lengths, 0)
    hidden = draft(taps, row.tokens, row.positions, blocks).detach()
    predicted = draft.predicted(hidden)
    previous, _ = positions_before(blocks, predicted.shape[1])
    said = [hidden, draft.logits(predicted), draft.to_verifier_ids(torch.arange(draft.config.draft_vocab_size)).float()]
    if draft.sequential is not None:
        said.append(draft.sequential.bias(draft.sequential.teacher_forced(predicted, row.tokens[previous])).detach())
    confidence = draft.confidence_logits(predicted, row.tokens[previous])
    if confidence is not None:
        said.append(confidence.detach())
    return torch.cat([part.flatten() for part in said])


def perturbed(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor.flip(0) if tensor.dtype == torch.bool else tensor + 1
    # A seed of its own: a perturbation along the initial weights would only scale them, and norms undo that.
    return tensor + 0.5 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(99))


CONFIGS = {
    "dflash": tiny_config("dflash"),
    "dflare": tiny_config("dflare"),
    "mixture": tiny_config("dflash", context_kv="separate"),
    "raw taps": tiny_config("dflare", standardize_taps=False),
    "window": tiny_config("dflash", windows=(9, 9)),
    "causal": tiny_config("dflash", causal=(True, True)),
    "layers that differ": tiny_config("dflash", windows=(9, None), causal=(True, False)),
    "dspark": tiny_config("dspark"),
    "gated": tiny_config("dspark", sequential_head="gated", confidence_with_previous=False),
    "rnn on dflare": tiny_config("dflare", sequential_head="rnn", markov_rank=8),
    "reduced": tiny_config("dflash", draft_vocab_size=40),
    "reduced dspark": tiny_config("dspark", draft_vocab_size=40),
}


@pytest.fixture(params=CONFIGS)
def saved(request: pytest.FixtureRequest, tiny_verifier: CausalVerifier, tmp_path: Path) -> tuple[BlockDraft, Path]:
    draft = tiny_draft(tiny_verifier, CONFIGS[request.param])
    folder = tmp_path / "draft"
    save_draft(folder, draft, contract_of(draft, tiny_verifier), torch.float32, {"made": "by a test"})
    return draft, folder


def test_export_then_import_is_equal(saved: tuple[BlockDraft, Path], tiny_verifier: CausalVerifier) -> None:
    draft, folder = saved
    loaded, contract = load_draft(folder, tiny_verifier, torch.float32)
    assert torch.equal(hidden_of(loaded, tiny_verifier), hidden_of(draft, tiny_verifier))
    save_draft(folder.with_name("again"), loaded, contract, torch.float32, {"made": "by a test"})
    for name in (WEIGHTS, CONFIG):
        assert (folder / name).read_bytes() == (folder.with_name("again") / name).read_bytes()


def test_every_tensor_matters(saved: tuple[BlockDraft, Path], tiny_verifier: CausalVerifier) -> None:
    _, folder = saved
    tensors = load_file(folder / WEIGHTS)
    wanted = hidden_of(load_draft(folder, tiny_verifier, torch.float32)[0], tiny_verifier)
    for name, tensor in tensors.items():
        rewrite(folder, {**tensors, name: perturbed(tensor)})
        if tensor.is_floating_point():
            changed = hidden_of(load_draft(folder, tiny_verifier, torch.float32)[0], tiny_verifier)
            assert not torch.allclose(changed, wanted, atol=1e-4), f"{name} has no effect"
        else:  # the vocabulary map stands twice, and its digest in the contract
            with pytest.raises(InputError, match="d2t"):
                load_draft(folder, tiny_verifier, torch.float32)
        missing = {k: v for k, v in tensors.items() if k != name}
        rewrite(folder, missing)
        with pytest.raises(InputError, match=name.replace(".", r"\.")):
            load_draft(folder, tiny_verifier, torch.float32)
    rewrite(folder, {**tensors, "mask_hidden": torch.zeros(3)})
    with pytest.raises(InputError, match="mask_hidden"):
        load_draft(folder, tiny_verifier, torch.float32)
    rewrite(folder, {**tensors, "norm.weight": torch.zeros(5)})
    with pytest.raises(InputError, match=r"norm\.weight: \[5\]"):
        load_draft(folder, tiny_verifier, torch.float32)


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    else:
        yield path


def leaf(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def other(value: Any) -> Any:
    """A value of the same type that says something else."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 2
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [*value[1:], other(value[0]) if value and value[0] is not None else 5]
    return 5


def changed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    copied = copy.deepcopy(config)
    place = copied
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copied


# Names are for people; a checkpoint that was moved or renamed is the same checkpoint.
INFORMATIVE = {("blockdraft", "verifier", "name"), ("blockdraft", "verifier", "revision")}
# These say where or in what dtype something lies; loading follows them, or the other copy of the same fact.
FOLLOWED = {("dtype",), ("blockdraft", "compute_dtype")}


def test_no_config_or_contract_field_is_ignored(saved: tuple[BlockDraft, Path], tiny_verifier: CausalVerifier) -> None:
    """Changing one statement alone is rejected (most facts stand twice) or changes what the draft computes."""
    _, folder = saved
    original = json.loads((folder / CONFIG).read_text())
    wanted = hidden_of(load_draft(folder, tiny_verifier, torch.float32)[0], tiny_verifier)
    for path in leaves(original):
        if path in INFORMATIVE | FOLLOWED or path == (DIGEST,):  # the signature is made anew here
            continue
        config = changed(original, path, other(leaf(original, path)))
        rewrite(folder, config=config)
        try:
            draft, _ = load_draft(folder, tiny_verifier, torch.float32)
        except InputError:
            continue
        found = hidden_of(draft, tiny_verifier)
        same = found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-5)
        assert not same, f"{path} has no effect"


# Facts of a draft that decide what it computes. Each is changed in every place that states it, as an exporter of
# another draft would write it, so that nothing contradicts anything: what is left is its effect.
FACTS: dict[str, tuple[str, dict[str, Any]]] = {
    "taps": ("dflash", {"target_layer_ids": (1, 2, 4)}),
    "mask token": ("dflash", {"mask_token_id": 77}),
    "rotary base": ("dflash", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    "window": ("dflash", {"windows": (9, 9)}),
    "window of one layer": ("dflash", {"windows": (9, None)}),
    "causality": ("dflash", {"causal": (True, True)}),
    "causality of one layer": ("dflash", {"causal": (True, False)}),
    "block size": ("dflash", {"block_size": 5}),
    "layout": ("dflash", {"sample_from_anchor": True}),
    "epsilon of norms": ("dflash", {"rms_norm_eps": 1e-2}),
    "query heads": ("dflash", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}),
    "standardized taps": ("dflare", {"standardize_taps": False}),
    "confidence from hidden states": ("dspark", {"confidence_with_previous": False}),
    "rank": ("dspark", {"markov_rank": 9}),
    "reduced vocabulary": ("dflash", {"draft_vocab_size": 40}),
}


@pytest.mark.parametrize("name", FACTS)
def test_every_fact_decides_what_the_draft_computes(name: str, tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    """The same weights under another config say something else; where they do not fit it, they are rejected by name."""
    method, change = FACTS[name]
    draft = tiny_draft(tiny_verifier, tiny_config(method))
    save_draft(tmp_path / "a", draft, contract_of(draft, tiny_verifier), torch.float32, {})
    wanted = hidden_of(load_draft(tmp_path / "a", tiny_verifier, torch.float32)[0], tiny_verifier)
    another = tiny_draft(tiny_verifier, tiny_config(method, **change))
    save_draft(tmp_path / "b", another, contract_of(another, tiny_verifier), torch.float32, {})
    rewrite(tmp_path / "b", tensors=load_file(tmp_path / "a" / WEIGHTS))
    try:
        found = hidden_of(load_draft(tmp_path / "b", tiny_verifier, torch.float32)[0], tiny_verifier)
    except InputError as error:
        assert error.field.startswith("checkpoint tensor") and name in NOT_THE_SAME_TENSORS
        return
    assert name not in NOT_THE_SAME_TENSORS
    assert found.shape != wanted.shape or not torch.allclose(found, wanted, atol=1e-5)


# Another set of tensors, or others shapes: the config names them, so that a file of the old ones is rejected.
NOT_THE_SAME_TENSORS = {
    "query heads", "standardized taps", "confidence from hidden states", "rank", "reduced vocabulary",
}  # fmt: skip


@pytest.mark.parametrize("name", [*VerifierIdentity.COMPARED, "logit_softcap"])
def test_every_fact_of_the_verifier_rejects_another(name: str, tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    """Changed in every place that states it, so that the comparison with the verifier is all that can object."""
    draft = tiny_draft(tiny_verifier, tiny_config())
    save_draft(tmp_path / "d", draft, contract_of(draft, tiny_verifier), torch.float32, {})
    config = json.loads((tmp_path / "d" / CONFIG).read_text())
    place = config["blockdraft"] if name == "logit_softcap" else config["blockdraft"]["verifier"]
    place[name] = other(place[name])
    if name == "architecture":
        config["speculators_config"]["verifier"]["architectures"] = [place[name]]
    if name == "vocab_size":
        draft = config["blockdraft"]["draft"]
        config["draft_vocab_size"] = draft["draft_vocab_size"] = draft["vocab_size"] = place[name]
        config["transformer_layer_config"]["vocab_size"] = place[name]
    rewrite(tmp_path / "d", config=config)
    read_checkpoint(tmp_path / "d")  # it contradicts nothing
    with pytest.raises(InputError, match=f"verifier {name}: the draft was trained for"):
        load_draft(tmp_path / "d", tiny_verifier, torch.float32)


def as_version_5(config: dict[str, Any]) -> dict[str, Any]:
    """The contract when it repeated most of the draft's config."""
    old = copy.deepcopy(config)
    contract = old["blockdraft"]
    draft = contract.pop("draft")
    explicit = draft.pop("standardize_taps")
    for name in ("hidden_size", "num_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
                 "intermediate_size", "rms_norm_eps", "vocab_size"):  # fmt: skip
        del draft[name]
    contract |= {
        "version": 5, **draft, "tap_ids": draft["target_layer_ids"], "method": config["speculators_model_type"],
        "tap_convention": "after_layers", "tap_kind": "residual_stream",
        "tap_standardisation": "explicit" if explicit else "none",
        "default_k": config["speculators_config"]["proposal_methods"][0]["speculative_tokens"],
    }  # fmt: skip
    del contract["target_layer_ids"]
    return old


def as_version_4(config: dict[str, Any]) -> dict[str, Any]:
    old = as_version_5(config)
    old["blockdraft"] |= {"version": 4, "final_norm": "rms"}
    return old


def as_version_3(config: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:
    old = as_version_4(config)
    old["blockdraft"] |= {"version": 3, "embedding_scale": scale}
    for name in ("matrices_digest", "revision"):
        del old["blockdraft"]["verifier"][name]
    return old


def test_a_contract_of_version_5_says_the_same(
    saved: tuple[BlockDraft, Path], tiny_verifier: CausalVerifier, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, folder = saved
    config = json.loads((folder / CONFIG).read_text())
    old = as_version_5(config)
    rewrite(folder, config=old)
    loaded, contract = load_draft(folder, tiny_verifier, torch.float32)
    assert contract == contract_of(draft, tiny_verifier) and capsys.readouterr().err == ""
    assert torch.equal(hidden_of(loaded, tiny_verifier), hidden_of(draft, tiny_verifier))
    for path in leaves(old["blockdraft"]):
        if path not in (("verifier", "name"), ("verifier", "revision"), ("compute_dtype",)):
            rewrite(folder, config=changed(old, ("blockdraft", *path), other(leaf(old["blockdraft"], path))))
            with pytest.raises(InputError):
                load_draft(folder, tiny_verifier, torch.float32)
    rewrite(folder, config={**old, "blockdraft": {**old["blockdraft"], "unheard": 1}})
    with pytest.raises(InputError, match="contract unheard: 1: unknown field"):
        load_draft(folder, tiny_verifier, torch.float32)


def test_a_contract_of_version_4_states_a_norm_that_nothing_reads(
    tiny_verifier: CausalVerifier, tmp_path: Path, said: Callable[[], str]
) -> None:
    draft = tiny_draft(tiny_verifier, tiny_config())
    save_draft(tmp_path / "d", draft, contract_of(draft, tiny_verifier), torch.float32, {})
    config = json.loads((tmp_path / "d" / CONFIG).read_text())
    assert "final_norm" not in config["blockdraft"]
    rewrite(tmp_path / "d", config=as_version_4(config))
    _, contract = load_draft(tmp_path / "d", tiny_verifier, torch.float32)
    assert contract == contract_of(draft, tiny_verifier) and said() == ""


def test_a_contract_of_version_3_is_read_and_what_it_does_not_say_is_said(
    tiny_verifier: CausalVerifier, tmp_path: Path, said: Callable[[], str]
) -> None:
    draft = tiny_draft(tiny_verifier, tiny_config())
    save_draft(tmp_path / "d", draft, contract_of(draft, tiny_verifier), torch.float32, {})
    config = json.loads((tmp_path / "d" / CONFIG).read_text())
    load_draft(tmp_path / "d", tiny_verifier, torch.float32)
    assert said() == ""
    rewrite(tmp_path / "d", config=as_version_3(config))
    loaded, contract = load_draft(tmp_path / "d", tiny_verifier, torch.float32)
    assert torch.equal(hidden_of(loaded, tiny_verifier), hidden_of(draft, tiny_verifier))
    assert contract.verifier.matrices_digest is None and contract.version == CONTRACT_VERSION
    assert "the matrices of tiny-llama were not compared, only its norms" in said()
    rewrite(tmp_path / "d", config=as_version_3(config, scale=2.0))
    with pytest.raises(InputError, match=r"contract embedding_scale: 2\.0"):
        load_draft(tmp_path / "d", tiny_verifier, torch.float32)


def test_compute_dtype_decides_what_auto_means(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    """`--dtype auto` computes in what the draft was trained in, where the device has it."""
    save_folder(tiny_verifier, tmp_path / "verifier")
    draft = tiny_draft(tiny_verifier, tiny_config())
    contract = contract_of(draft, tiny_verifier)
    for trained_in in ("float32", "bfloat16"):
        folder = tmp_path / trained_in
        save_draft(folder, draft, dataclasses.replace(contract, compute_dtype=trained_in), torch.float32, {})
        pair = load_pair(CheckpointSettings(checkpoint=folder, verifier_name_or_path=str(tmp_path / "verifier")))
        half = trained_in == "bfloat16" and has_fast_bfloat16(pair.verifier.device)
        wanted = torch.bfloat16 if half else torch.float32
        assert pair.verifier.dtype == pair.draft.norm.weight.dtype == wanted


@pytest.mark.parametrize(
    ("name", "value"), [("aux_hidden_state_layer_ids", None), ("block_size", 16), ("unknown_key", 1)]
)
def test_missing_conflicting_and_unknown_keys_are_named(
    tiny_verifier: CausalVerifier, tmp_path: Path, name: str, value: object
) -> None:
    draft = tiny_draft(tiny_verifier, tiny_config())
    folder = tmp_path / "draft"
    save_draft(folder, draft, contract_of(draft, tiny_verifier), torch.float32, {})
    raw = json.loads((folder / CONFIG).read_text())
    raw[name] = value
    if value is None:
        del raw[name]
    (folder / CONFIG).write_text(json.dumps(raw))
    with pytest.raises(InputError, match=name):
        load_draft(folder, tiny_verifier, torch.float32)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_another_verifier_is_refused(tiny_verifier: CausalVerifier, tmp_path: Path, kind: str) -> None:
    draft = tiny_draft(tiny_verifier, tiny_config())
    save_draft(tmp_path / "d", draft, contract_of(draft, tiny_verifier), torch.float32, {})
    with pytest.raises(InputError, match="verifier architecture"):
        load_draft(tmp_path / "d", tiny_verifier_of(kind), torch.float32)


def test_damage_and_absence_are_one_line(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        load_draft(tmp_path / "none", tiny_verifier, torch.float32)
    draft = tiny_draft(tiny_verifier, tiny_config())
    folder = tmp_path / "d"
    save_draft(folder, draft, contract_of(draft, tiny_verifier), torch.float32, {})
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-50])
    with pytest.raises(InputError, match="damaged"):
        load_draft(folder, tiny_verifier, torch.float32)
    (folder / WEIGHTS).unlink()
    with pytest.raises(InputError, match="no such file"):
        load_draft(folder, tiny_verifier, torch.float32)
    (folder / CONFIG).write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        load_draft(folder, tiny_verifier, torch.float32)


def test_dtype_is_kept(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    draft = tiny_draft(tiny_verifier, tiny_config())
    save_draft(tmp_path / "d", draft, contract_of(draft, tiny_verifier), torch.bfloat16, {})
    assert {t.dtype for t in load_file(tmp_path / "d" / WEIGHTS).values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "d" / CONFIG).read_text())["dtype"] == "bfloat16"


def test_a_failed_save_leaves_the_old_checkpoint(
    tiny_verifier: CausalVerifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = tiny_draft(tiny_verifier, tiny_config())
    contract = contract_of(draft, tiny_verifier)
    save_draft(tmp_path / "d", draft, contract, torch.float32, {})
    before = (tmp_path / "d" / WEIGHTS).read_bytes()
    with pytest.raises(TypeError):
        save_draft(tmp_path / "d", draft, contract, torch.float32, {"not": {1, 2}})
    assert (tmp_path / "d" / WEIGHTS).read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_what_the_format_cannot_state_is_written_as_a_mixture(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    """One causality and one window for all layers is all an engine would read; it must not take such a draft."""
    for changes in ({"causal": (True, False)}, {"windows": (9, 11)}):
        draft = tiny_draft(tiny_verifier, tiny_config("dflash", **changes))
        save_draft(tmp_path / "draft", draft, contract_of(draft, tiny_verifier), torch.float32, {})
        raw = json.loads((tmp_path / "draft" / CONFIG).read_text())
        assert raw["speculators_model_type"] == "blockdraft" and raw["architectures"] == ["BlockDraftModel"]


def test_dspark_is_written_as_others_read_it(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    draft = tiny_draft(tiny_verifier, tiny_config("dspark", draft_vocab_size=40))
    save_draft(tmp_path / "draft", draft, contract_of(draft, tiny_verifier), torch.bfloat16, {})
    raw = json.loads((tmp_path / "draft" / CONFIG).read_text())
    wanted = {
        "architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark", "sample_from_anchor": True,
        "markov_rank": 12, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "draft_vocab_size": 40,
    }  # fmt: skip
    assert {key: raw[key] for key in wanted} == wanted
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 8
    tensors = load_file(tmp_path / "draft" / WEIGHTS)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    assert shapes["markov_head.markov_w1.weight"] == [128, 12] and shapes["markov_head.markov_w2.weight"] == [40, 12]
    assert shapes["confidence_head.proj.weight"] == [1, 32 + 12] and shapes["confidence_head.proj.bias"] == [1]
    assert shapes["lm_head.weight"] == [40, 32] and tensors["lm_head.weight"].dtype == torch.bfloat16
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    kept = tensors["t2d"].nonzero()[:, 0]
    assert torch.equal(kept, torch.arange(40) + tensors["d2t"])
    torch.testing.assert_close(tensors["lm_head.weight"], tiny_verifier.head_VE[kept].bfloat16())
