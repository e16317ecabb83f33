"""Which verifier is this: the same answer from a loaded model, its folder and the hub; another one for a fine-tune."""

from __future__ import annotations

import dataclasses
import functools
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
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    NanoChatConfig,
    NanoChatForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from blockdraft.checkpoints.store import CONFIG, save_draft
from blockdraft.cli.main import run
from blockdraft.contract import VerifierIdentity
from blockdraft.errors import InputError
from blockdraft.verifiers.identity import identity_of, model_class, read_identity
from blockdraft.verifiers.loading import save_folder
from conftest import (
    _COMMON,
    contract_of,
    rewrite,
    tiny_config,
    tiny_draft,
    tiny_encoder_decoder,
    tiny_model,
    tiny_tokenizer,
    tiny_verifier_of,
)
from verifiers.hub_server import COMMIT, hub_server


def _multimodal() -> PreTrainedModel:
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
              "image_size": 4, "patch_size": 2}  # fmt: skip
    text = {**_COMMON, "layer_types": ["sliding_attention"] * 4}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **{kind: functools.partial(tiny_model, kind) for kind in ("llama", "llama_tied", "qwen3", "gemma3")},
    "experts apart in files": lambda: MixtralForCausalLM(MixtralConfig(**_COMMON, num_local_experts=4)),
    "shared experts": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**_COMMON, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    ),
    "text part of a multimodal model": _multimodal,
    "encoder-decoder": lambda: tiny_encoder_decoder().model,
    "norms without weights": lambda: OlmoForCausalLM(OlmoConfig(**_COMMON)),
    "norms without weights, tied": lambda: NanoChatForCausalLM(NanoChatConfig(**_COMMON)),
}


def written(model: PreTrainedModel, folder: Path, **how: Any) -> str:
    model.save_pretrained(folder, **how)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def loaded_identity(folder: str, dtype: torch.dtype, config: Any) -> VerifierIdentity:
    model = model_class(config).from_pretrained(folder, dtype=dtype)
    return identity_of(model, tiny_tokenizer(), folder)


@pytest.mark.parametrize("kind", MODELS)
def test_a_folder_and_its_loaded_model_are_the_same_verifier(kind: str, tmp_path: Path) -> None:
    """In one file or in many, in float32 or in bfloat16, whatever the tensors in the files are called."""
    torch.manual_seed(1)
    model = MODELS[kind]()
    whole, shards = written(model, tmp_path / "a"), written(model, tmp_path / "b", max_shard_size="40KB")
    assert len(list(Path(shards).glob("*.safetensors"))) > 2
    wanted = dataclasses.replace(read_identity(whole)[0], name="")
    assert wanted.matrices_digest is not None
    found = [loaded_identity(whole, dtype, model.config) for dtype in (torch.float32, torch.bfloat16)]
    for each in (read_identity(shards)[0], *found):
        assert dataclasses.replace(each, name="") == wanted
    rounded = written(model.to(torch.bfloat16), tmp_path / "c")
    assert dataclasses.replace(read_identity(rounded)[0], name="") == wanted


def adapted(model: PreTrainedModel) -> torch.nn.Parameter:
    """A matrix that adapters are put on: a stack of experts, else a projection of the last layer."""
    ends = ("q_proj.weight", "v_proj.weight")
    named = dict(model.get_decoder().named_parameters())
    return ([p for p in named.values() if p.ndim == 3] or [p for name, p in named.items() if name.endswith(ends)])[-1]


@pytest.mark.parametrize("kind", ["llama", "experts apart in files", "norms without weights", "encoder-decoder"])
def test_a_merged_adapter_makes_another_verifier(kind: str, tmp_path: Path) -> None:
    """It keeps every norm and adds a product of low rank to one matrix of one layer."""
    torch.manual_seed(1)
    model = MODELS[kind]()
    before = read_identity(written(model, tmp_path / "base"))[0]
    with torch.no_grad():
        weight = adapted(model)
        weight += 0.05 * torch.randn(*weight.shape[:-1], 1) @ torch.randn(*weight.shape[:-2], 1, weight.shape[-1])
    after = read_identity(written(model, tmp_path / "tuned"))[0]
    differ = [name for name in VerifierIdentity.COMPARED if getattr(before, name) != getattr(after, name)]
    assert differ == ["matrices_digest"]


def test_the_commands_reject_a_fine_tune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verifier = tiny_verifier_of("llama")
    save_folder(verifier, tmp_path / "base")
    draft = tiny_draft(verifier, tiny_config())
    save_draft(tmp_path / "draft", draft, contract_of(draft, verifier), torch.float32, {})
    check = ["check", str(tmp_path / "draft"), "--verifier-name-or-path"]
    assert run([*check, str(tmp_path / "base"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["matrices compared"] is True
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"] *= 1.1
    (tmp_path / "tuned").mkdir()
    for path in (tmp_path / "base").iterdir():
        (tmp_path / "tuned" / path.name).write_bytes(path.read_bytes())
    save_file(tensors, tmp_path / "tuned" / "model.safetensors", metadata={"format": "pt"})
    assert run([*check, str(tmp_path / "tuned")]) == 1
    assert "verifier matrices_digest: the draft was trained for" in capsys.readouterr().out


def test_quantized_matrices_are_not_compared_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verifier = tiny_verifier_of("llama")
    save_folder(verifier, tmp_path / "v")
    draft = tiny_draft(verifier, tiny_config())
    save_draft(tmp_path / "draft", draft, contract_of(draft, verifier), torch.float32, {})
    config = json.loads((tmp_path / "v" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "v" / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "v" / "model.safetensors")
    packed = {name: t.to(torch.float8_e4m3fn) if t.ndim > 1 else t for name, t in tensors.items()}
    save_file(packed, tmp_path / "v" / "model.safetensors", metadata={"format": "pt"})
    arguments = ["check", str(tmp_path / "draft"), "--verifier-name-or-path", str(tmp_path / "v"), "--json"]
    capsys.readouterr()
    assert run(arguments) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["matrices compared"] is False
    assert captured.err.count("\n") == 1 and "were not compared, only its norms: they are quantized" in captured.err
    assert run([*arguments, "--quiet"]) == 0
    assert capsys.readouterr().err == captured.err  # a warning
    packed["model.layers.1.input_layernorm.weight"][3] += 1  # norms are still compared
    save_file(packed, tmp_path / "v" / "model.safetensors", metadata={"format": "pt"})
    assert run(arguments) == 1
    assert "verifier norms_hash: the draft was trained for" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["norms without weights", "norms without weights, tied"])
def test_a_draft_of_a_verifier_whose_norms_have_no_weights_is_checked(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(1)
    folder = written(MODELS[family](), tmp_path / "v")
    identity, softcap = read_identity(folder)
    base = tiny_verifier_of("llama")
    draft = tiny_draft(base, tiny_config())
    contract = dataclasses.replace(contract_of(draft, base), verifier=identity, logit_softcap=softcap)
    save_draft(tmp_path / "draft", draft, contract, torch.float32, {})
    capsys.readouterr()
    assert run(["check", str(tmp_path / "draft"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["verifier compared"] is True and result["matrices compared"] is True


def test_files_without_a_tensor_of_the_model_are_rejected_or_not_compared(tmp_path: Path) -> None:
    folder = Path(written(tiny_model("llama"), tmp_path / "v"))
    tensors = load_file(folder / "model.safetensors")
    matrix, norm = "model.layers.2.mlp.up_proj.weight", "model.layers.2.input_layernorm.weight"
    save_file({name: t for name, t in tensors.items() if name != matrix}, folder / "model.safetensors")
    assert read_identity(str(folder))[0].matrices_digest is None
    save_file({name: t for name, t in tensors.items() if name != norm}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"have no model\.layers\.2\.input_layernorm\.weight"):
        read_identity(str(folder))
    whole = (folder / "model.safetensors").read_bytes()
    for damage in (b"short", whole[:2000], b"\xff" * 8 + whole[8:]):
        (folder / "model.safetensors").write_bytes(damage)
        with pytest.raises(InputError, match="cannot be read"):
            read_identity(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="there is no safetensors file"):
        read_identity(str(folder))


WIDE = {**_COMMON, "hidden_size": 256, "intermediate_size": 1024}


@pytest.mark.parametrize("shard", ["1GB", "2MB"])
@pytest.mark.slow
def test_of_a_hub_id_only_a_few_rows_are_fetched(tmp_path: Path, shard: str) -> None:
    """The real client against a server on this machine, at a tag; the commit goes into the identity."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    folder = written(LlamaForCausalLM(LlamaConfig(**WIDE)), tmp_path / "v", max_shard_size=shard)
    size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    identity = read_identity(folder)[0]
    script = "from blockdraft.verifiers.identity import read_identity\nimport dataclasses, json, sys\n"
    script += "print(json.dumps(dataclasses.asdict(read_identity('org/tiny', revision='v1')[0])))"
    with hub_server(Path(folder), "org/tiny", "v1") as (url, hub):
        variables = {**os.environ, "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache")}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=variables)
        assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["revision"] == COMMIT
    assert {name: found[name] for name in VerifierIdentity.COMPARED} == {
        name: getattr(identity, name) for name in VerifierIdentity.COMPARED
    }
    fetched = sum(n for name, n in hub.served.items() if name.endswith(".safetensors"))
    assert 0 < fetched < size / 50
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_revision_belongs_to_a_hub_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verifier = tiny_verifier_of("llama")
    save_folder(verifier, tmp_path / "v")
    draft = tiny_draft(verifier, tiny_config())
    save_draft(tmp_path / "draft", draft, contract_of(draft, verifier), torch.float32, {})
    prompts, data = tmp_path / "p.jsonl", tmp_path / "data"
    prompts.write_text('{"prompt": "w1"}\n')
    named = ("--verifier-name-or-path", str(tmp_path / "v"), "--revision", "v1")
    capsys.readouterr()
    for words in (
        ("evaluate", str(tmp_path / "draft")),
        ("generate", str(tmp_path / "draft"), "w1"),
        ("generate", str(tmp_path / "draft"), "w1", "--engine", "vllm"),
        ("check", str(tmp_path / "draft")),
        ("serve", str(tmp_path / "draft")),
        ("parity", str(tmp_path / "draft")),
        ("prepare", "--source", f"s={prompts}", "--save-path", str(data)),
        ("quickstart", "--save-path", str(tmp_path / "quick")),
    ):
        assert run([*words, *named]) == 2, words
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and "--revision: v1: belongs to a hub id" in line, words
    assert run(["prepare", "--source", f"s={prompts}", "--save-path", str(data), "--revision", "v1"]) == 2  # GGUF
    assert "--revision: v1" in capsys.readouterr().err


@pytest.mark.slow
def test_the_recorded_revision_is_asked_for_again(tmp_path: Path) -> None:
    """A checkpoint names hub id and commit; a command that names no verifier asks for just that commit."""
    verifier = tiny_verifier_of("llama")
    save_folder(verifier, tmp_path / "v")
    draft = tiny_draft(verifier, tiny_config())
    save_draft(tmp_path / "draft", draft, contract_of(draft, verifier), torch.float32, {})
    config = json.loads((tmp_path / "draft" / CONFIG).read_text())
    config["blockdraft"]["verifier"] |= {"name": "org/tiny", "revision": COMMIT}
    config["speculators_config"]["verifier"]["name_or_path"] = "org/tiny"
    rewrite(tmp_path / "draft", config=config, sign=False)
    arguments = [sys.executable, "-m", "blockdraft.cli.main", "evaluate", str(tmp_path / "draft"), "--dtype", "float32",
                 "--max-prompts", "2", "--max-new-tokens", "4", "--json"]  # fmt: skip
    with hub_server(tmp_path / "v", "org/tiny", "v1") as (url, hub):
        variables = {**os.environ, "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache")}
        done = subprocess.run(arguments, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    assert hub.revisions == {COMMIT}


@pytest.mark.real
def test_the_embedded_model_and_its_folder_are_the_same_verifier(real_folder: Path, real_verifier: Any) -> None:
    from blockdraft.verifiers.loading import EMBEDDED, load_verifier

    identity = read_identity(str(real_folder))[0]
    for found in (load_verifier(EMBEDDED, torch.bfloat16).identity, real_verifier.identity):
        assert dataclasses.replace(found, name="") == dataclasses.replace(identity, name="")
    assert identity.matrices_digest is not None
    model = AutoModelForCausalLM.from_pretrained(real_folder, dtype=torch.bfloat16)
    assert identity_of(model, real_verifier.tokenizer, str(real_folder)).matrices_digest == identity.matrices_digest
