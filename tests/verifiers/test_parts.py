"""The parts of a verifier that training reads are those of the whole model, whatever the family and the files."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, BartConfig, BartForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from blockdraft.errors import InputError
from blockdraft.verifiers import tensor_files
from blockdraft.verifiers.identity import model_class
from blockdraft.verifiers.loading import load_verifier, save_folder
from blockdraft.verifiers.parts import VerifierParts, read_parts
from conftest import random_example, tiny_encoder_decoder, tiny_tokenizer, tiny_verifier_of
from verifiers.families import Family, tiny_config, tiny_model
from verifiers.hub_server import COMMIT, hub_server
from verifiers.trimmed import keep_parts

TOKENS = torch.tensor([random_example(24, 1, 3).input_ids])
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
           "image_size": 16, "patch_size": 8}  # fmt: skip


def _wrapped(model_type: str, text_type: str) -> PreTrainedModel:
    """A multimodal model that has no causal class."""
    text = tiny_config(Family(text_type)).to_dict()
    torch.manual_seed(1)
    config = CONFIG_MAPPING[model_type](text_config=text, vision_config={"model_type": "pixtral", **_VISION})
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **{
        family.name: lambda family=family: tiny_model(family)
        for family in (
            Family("llama"),
            Family("llama", {"tie_word_embeddings": True}, note="tied"),
            Family("qwen3"),
            Family("gemma2", {"final_logit_softcapping": 5.0}),
            Family("gemma3", text_type="gemma3_text"),
            Family("gemma4", {"num_kv_shared_layers": 2}, text_type="gemma4_text"),
            Family("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
            Family("starcoder2"),  # LayerNorm with a bias
            Family("olmo"),  # norms without weights
            Family("gpt_oss"),
            Family("qwen3_next"),
            Family("qwen3_5_text"),
            Family("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
        )
    },
    "llava": lambda: _wrapped("llava", "llama"),
    "mistral3": lambda: _wrapped("mistral3", "mistral"),
}


def saved(model: PreTrainedModel, folder: Path, **how: Any) -> str:
    model.save_pretrained(folder, **how)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def parts_of(folder: str | Path) -> VerifierParts:
    return read_parts(str(folder), torch.float32, "cpu")


@torch.no_grad()
def own_ends(folder: str, config: Any) -> tuple[torch.Tensor, torch.Tensor, PreTrainedModel]:
    """What the model itself puts into its final norm, and the logits that come of it."""
    own = model_class(config).from_pretrained(folder, dtype=torch.float32).eval()
    raw = {}
    names = ("norm", "embedding_norm")
    norm = next(getattr(own.get_decoder(), name) for name in names if hasattr(own.get_decoder(), name))
    norm.register_forward_pre_hook(lambda _, args: raw.update(found=args[0]))
    return own(TOKENS, use_cache=False).logits[0], raw["found"].reshape(TOKENS.shape[1], -1), own


@pytest.mark.parametrize("kind", MODELS)
def test_parts_are_those_of_the_whole_model(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In shards, and in a folder that holds nothing else of it; read in pieces that no row fits."""
    monkeypatch.setattr(tensor_files, "_PIECE", 1000)
    model = MODELS[kind]()
    folder = saved(model, tmp_path / "v", max_shard_size="20KB")
    logits, raw, own = own_ends(folder, model.config)
    whole = parts_of(folder)
    keep_parts(Path(folder), tmp_path / "cut")
    cut = parts_of(tmp_path / "cut")
    for parts in (whole, cut):
        assert torch.equal(parts.head_VE, own.get_output_embeddings().weight)
        assert torch.equal(parts.embed(TOKENS), own.get_input_embeddings().weight[TOKENS])
        found = parts.logits(parts.normed(raw))
        torch.testing.assert_close(found, logits.float(), rtol=1e-4, atol=1e-4)
        assert torch.equal(parts.greedy(parts.normed(raw)), found.argmax(dim=-1))
    assert whole.identity.matrices_digest is not None and cut.identity.matrices_digest is None
    unnamed = dataclasses.replace(cut.identity, name=whole.identity.name)
    assert dataclasses.replace(unnamed, matrices_digest=whole.identity.matrices_digest) == whole.identity


@pytest.mark.parametrize("kind", ["llama_tied", "gemma3", "t5gemma2"])
def test_parts_are_what_training_reads_of_a_loaded_verifier(kind: str, tmp_path: Path) -> None:
    made = tiny_encoder_decoder() if kind == "t5gemma2" else tiny_verifier_of(kind)
    save_folder(made, tmp_path / "v")
    for dtype in (torch.float32, torch.bfloat16):
        wanted, found = load_verifier(str(tmp_path / "v"), dtype, "cpu"), read_parts(str(tmp_path / "v"), dtype, "cpu")
        for name in ("identity", "logit_softcap", "context_length", "has_encoder", "stop_ids", "dtype", "window"):
            assert getattr(found, name) == getattr(wanted, name), name
        assert found.layer_shape() == wanted.layer_shape() and found.rope_parameters() == wanted.rope_parameters()
        assert found.sides([5, 6], "prompt") == wanted.sides([5, 6], "prompt")
        with pytest.raises(InputError, match="prompt: empty"):
            found.sides([], "prompt")
        ids, raw = torch.arange(128), torch.randn(7, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert torch.equal(found.embed(ids), wanted.embed(ids))
        final = wanted.normed(raw)
        assert torch.equal(found.normed(raw), final) and torch.equal(found.logits(final), wanted.logits(final))
        assert not found.embed(ids).requires_grad and not found.head_VE.requires_grad


def _changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], **config: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, **config}))


FP8 = {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}}
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16}}
PROJECTION = "model.layers.1.mlp.up_proj"


def _pack(tensors: dict[str, torch.Tensor], owner: str, *names: str) -> None:
    del tensors[f"{owner}.weight"]
    tensors.update({f"{owner}.{name}": torch.ones(4, 4, dtype=torch.int32) for name in names})


@pytest.mark.parametrize(
    ("quantize", "config"),
    [
        (lambda t: t.update({f"{PROJECTION}.weight": t[f"{PROJECTION}.weight"].to(torch.float8_e4m3fn),
                             f"{PROJECTION}.weight_scale_inv": torch.ones(1, 1)}), FP8),
        (lambda t: _pack(t, PROJECTION, "qweight", "qzeros", "scales", "g_idx"), GPTQ),
        (lambda t: _pack(t, PROJECTION, "weight_packed", "weight_scale", "weight_shape"),
         {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}),
    ],
    ids=["fp8", "gptq", "compressed-tensors"],
)  # fmt: skip
def test_layers_may_be_quantized(tmp_path: Path, quantize: Callable, config: dict[str, Any]) -> None:
    save_folder(tiny_verifier_of("llama"), tmp_path / "v")
    plain = parts_of(tmp_path / "v")
    _changed(tmp_path / "v", quantize, **config)
    parts = parts_of(tmp_path / "v")
    assert torch.equal(parts.head_VE, plain.head_VE) and parts.identity.norms_hash == plain.identity.norms_hash
    assert parts.identity.matrices_digest is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: _pack(t, "lm_head", "qweight", "scales"), r"its output head is quantized \(lm_head\.qweight, I32\)"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}),
         r"its output head is quantized \(lm_head\.weight, F8_E4M3\)"),
        (lambda t: t.pop("lm_head.weight"), r"have no lm_head\.weight \(output head\)"),
        (lambda t: t.pop("model.embed_tokens.weight"), r"have no model\.embed_tokens\.weight \(embedding\)"),
        (lambda t: t.pop("model.norm.weight"), r"have no model\.norm\.weight"),
        (lambda t: t.pop("model.layers.2.input_layernorm.weight"), r"have no model\.layers\.2\.input_layernorm"),
        (lambda t: t.update({"lm_head.weight": torch.ones(7, 32)}), r"lm_head\.weight is \[7, 32\], .* \[128, 32\]"),
    ],
    ids=["packed head", "FP8 head", "no head", "no embedding", "no final norm", "no norm of a layer", "shape"],
)  # fmt: skip
def test_what_cannot_be_shared_is_named(tmp_path: Path, change: Callable, says: str) -> None:
    save_folder(tiny_verifier_of("llama"), tmp_path / "v")
    _changed(tmp_path / "v", change)
    with pytest.raises(InputError, match=says) as error:
        parts_of(tmp_path / "v")
    assert "\n" not in str(error.value)


def test_what_is_no_language_model_is_named(tmp_path: Path) -> None:
    bart = BartForCausalLM(BartConfig(d_model=16, decoder_layers=1, vocab_size=99, decoder_ffn_dim=8,
                                      decoder_attention_heads=2, is_encoder_decoder=True))  # fmt: skip
    for name, says in ((saved(bart, tmp_path / "bart"), "not"), ("model.gguf", "a GGUF file is only read whole")):
        with pytest.raises(InputError, match=says) as error:
            parts_of(name)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "says"),
    [
        (Family("falcon_h1", {"lm_head_multiplier": 0.5}), "its logits are not understood"),
        (Family("inkling_text"), "its logits are not understood"),
        (Family("mbart"), "its output head cannot be run alone"),
        (Family("phi"), "its output head has a bias"),
        (Family("gpt2"), "no list of decoder layers"),
        (Family("bart"), "its final norm is not known"),
        (Family("mamba"), "does not state max_position_embeddings"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_family_whose_parts_are_not_enough_is_rejected(family: Family, says: str, tmp_path: Path) -> None:
    folder = saved(tiny_model(family), tmp_path)
    with pytest.raises(InputError, match=says) as error:
        parts_of(folder)
    assert "is not supported" in str(error.value) and "\n" not in str(error.value)


def test_a_shape_that_the_config_does_not_state_is_given(tmp_path: Path) -> None:
    folder = saved(tiny_model(Family("gpt_neox_japanese")), tmp_path / "v")
    with pytest.raises(InputError, match=r"does not state the shape of a layer .*--num-attention-heads"):
        parts_of(folder).layer_shape()
    given = {"num_attention_heads": 2, "intermediate_size": 40, "num_key_value_heads": None, "head_dim": None}
    shape = read_parts(folder, torch.float32, "cpu", shape=given).layer_shape()
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.intermediate_size) == (2, 2, 16, 40)


def test_of_a_hub_id_only_the_parts_are_fetched(tmp_path: Path) -> None:
    """The real client against a server on this machine, in one file and with the layers' bytes left there."""
    save_folder(tiny_verifier_of("llama"), tmp_path / "v")
    size = (tmp_path / "v" / "model.safetensors").stat().st_size
    local = read_parts(str(tmp_path / "v"), torch.bfloat16, "cpu")
    script = "import torch\nfrom blockdraft.verifiers import tensor_files\n"
    script += "from blockdraft.verifiers.parts import read_parts\ntensor_files._PIECE = 3000\n"
    script += "p = read_parts('org/tiny', torch.bfloat16, 'cpu', revision='v1')\n"
    script += "ends = {'head': p.head_VE, 'embed': p.embed(torch.arange(128)), 'normed': p.normed(torch.ones(3, 32))}\n"
    script += f"torch.save((ends, p.identity), {str(tmp_path / 'found')!r})"
    with hub_server(tmp_path / "v", "org/tiny", "v1") as (url, hub):
        variables = {**os.environ, "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache")}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=variables)
        assert done.returncode == 0, done.stderr
    ends, identity = torch.load(tmp_path / "found", weights_only=False)
    assert torch.equal(ends["head"], local.head_VE) and torch.equal(ends["embed"], local.embed(torch.arange(128)))
    assert torch.equal(ends["normed"], local.normed(torch.ones(3, 32)))
    assert (identity.revision, identity.matrices_digest) == (COMMIT, local.identity.matrices_digest)
    assert sum(n for name, n in hub.served.items() if name.endswith(".safetensors")) < 0.7 * size
