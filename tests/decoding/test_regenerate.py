"""Replies written to disk: resumable to the same result, never reused for another request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blockdraft.decoding import regenerate as module
from blockdraft.decoding.engine import DecodingEngine
from blockdraft.errors import InputError
from blockdraft.verifiers.causal import CausalVerifier
from conftest import random_document

PROMPTS = [random_document(4 + i, 1, i).input_ids for i in range(10)]


def test_a_kill_and_a_rerun_give_the_clean_result(
    tiny_verifier: CausalVerifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = module.regenerate(tiny_verifier, PROMPTS, 8, 3, tmp_path / "clean")
    original, calls = DecodingEngine.generate, []

    def dies_in_the_third_batch(self, prompts, *args, **kwargs):
        calls.append(len(prompts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, prompts, *args, **kwargs)

    monkeypatch.setattr(DecodingEngine, "generate", dies_in_the_third_batch)
    with pytest.raises(KeyboardInterrupt):
        module.regenerate(tiny_verifier, PROMPTS, 8, 3, tmp_path / "killed")
    assert not (tmp_path / "killed" / module.DOCUMENTS).exists()
    (partial,) = (tmp_path / "killed").glob(".documents.partial*")
    partial.write_text(partial.read_text() + '{"id": "half a li')  # the kill came in the middle of a write
    resumed = module.regenerate(tiny_verifier, PROMPTS, 8, 3, tmp_path / "killed")
    assert resumed == clean
    assert calls == [3, 3, 3, 3, 1]  # the first two batches were not decoded again
    names = [{p.name for p in (tmp_path / folder).iterdir()} for folder in ("clean", "killed")]
    assert names[0] == names[1] == {module.DOCUMENTS, module.RECORD}
    texts = [(tmp_path / folder / module.DOCUMENTS).read_bytes() for folder in ("clean", "killed")]
    assert texts[0] == texts[1]


def test_the_same_request_is_read_and_another_refused(
    tiny_verifier: CausalVerifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = module.regenerate(tiny_verifier, PROMPTS, 8, 3, tmp_path)
    record = json.loads((tmp_path / module.RECORD).read_text())
    assert record["counts"]["documents"] == 10
    monkeypatch.setattr(DecodingEngine, "generate", None)  # reading must not decode
    assert module.regenerate(tiny_verifier, PROMPTS, 8, 3, tmp_path) == made
    with pytest.raises(InputError, match="max_new_tokens 8, now asked for 9"):
        module.regenerate(tiny_verifier, PROMPTS, 9, 3, tmp_path)
    with pytest.raises(InputError, match="prompts"):
        module.regenerate(tiny_verifier, PROMPTS[1:], 8, 3, tmp_path)
