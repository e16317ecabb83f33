"""The commands with verifiers that are unlike Llama: trained, evaluated, and decoded as transformers decodes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from blockdraft.cli.main import run
from conftest import MASK, tiny_tokenizer
from verifiers.families import Family, tiny_model

UNLIKE_LLAMA = [
    Family("gemma2", {"attn_logit_softcapping": 2.0}, note="soft cap"),
    Family("gpt_oss", note="sinks"),
    Family("granite", {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0}),
    Family("cohere", {"logit_scale": 0.25}),
    Family("qwen2_moe"),
    Family("gemma4_text", {"num_kv_shared_layers": 2}),
    Family("gemma4", {"num_kv_shared_layers": 2}, text_type="gemma4_text"),
]
LONGEST = 20


def call(capsys: pytest.CaptureFixture[str], verb: str, *arguments: object, **flags: object) -> dict[str, Any]:
    """A command's JSON."""
    named = [str(word) for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
    code = run([verb, *map(str, arguments), *named, "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


@pytest.mark.parametrize("family", UNLIKE_LLAMA, ids=lambda family: family.name)
@pytest.mark.slow
def test_train_evaluate_and_generate(family: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, verifier = tiny_model(family), tmp_path / "verifier"
    model.generation_config.eos_token_id = 1
    with torch.no_grad():  # rows that the tokenizer does not use are never the argmax: one of them is the mask token
        model.get_output_embeddings().weight[97:] = 0
    model.save_pretrained(verifier)
    tiny_tokenizer().save_pretrained(verifier)
    prompts = tmp_path / "prompts.jsonl"
    texts = [f"w{i} w{i + 7} w{2 * i} " + "w5 w6 w7 " * i for i in range(10)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    own: dict[str, object] = {"verifier_name_or_path": verifier}
    exact: dict[str, object] = {"dtype": "float32", "device": "cpu"}
    call(capsys, "prepare", "--prompts-only", **own, source=f"s={prompts}", save_path=tmp_path / "p", num_workers=1)
    call(
        capsys, "regenerate", **own, **exact, data_path=tmp_path / "p", save_path=tmp_path / "d", max_new_tokens=LONGEST
    )
    made = call(
        capsys, "train", **own, **exact, data_path=tmp_path / "d", save_path=tmp_path / "run", epochs=1, num_layers=1,
        num_taps=2, mask_token_id=MASK, logger="none",
    )  # fmt: skip
    found = call(
        capsys, "evaluate", made["checkpoint"], "--decode", **exact, data_path=prompts, k=3, max_new_tokens=LONGEST
    )
    proof = found["decoding"]["3"]
    assert (proof["identical"], proof["same_rounds_as_one_pass"], proof["mismatches"]) == (len(texts), len(texts), 0)
    assert found["disagreements"] == 0

    replies = call(capsys, "generate", made["checkpoint"], **exact, data_path=prompts, max_new_tokens=LONGEST)[
        "replies"
    ]
    fresh = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32, attn_implementation="eager").eval()
    for text, reply in zip(texts, replies, strict=True):
        chat = [{"role": "user", "content": text}]
        asked = tiny_tokenizer().apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        with torch.no_grad():
            wanted = fresh.generate(asked, max_new_tokens=LONGEST, do_sample=False, pad_token_id=0)[0]
        assert reply["tokens"] == wanted[asked.shape[1] :].tolist()


def test_examples_past_the_context_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verifier = tmp_path / "verifier"
    tiny_model(Family("llama", {"max_position_embeddings": 32})).save_pretrained(verifier)
    tiny_tokenizer().save_pretrained(verifier)
    rows = [{"prompt": "w1 w2", "response": "w3 " * length} for length in (10, 50)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own: dict[str, object] = {"verifier_name_or_path": verifier}
    call(capsys, "prepare", **own, source=f"s={tmp_path / 'rows.jsonl'}", save_path=tmp_path / "d", num_workers=1)
    train = ["train", "--verifier-name-or-path", str(verifier), "--data-path", str(tmp_path / "d"), "--save-path"]
    assert run([*train, str(tmp_path / "run"), "--mask-token-id", str(MASK)]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the verifier's context holds 32; prepare the data with --max-length 32" in said
