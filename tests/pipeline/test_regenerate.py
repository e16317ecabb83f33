"""The verifier's own replies: the same in process and through a server, kill or no kill, and none lost on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from blockdraft.data.conversations import Conversation
from blockdraft.data.journal import Journal
from blockdraft.data.table import RECORD, REJECTS, read_examples, read_table
from blockdraft.data.templates import ChatTemplate
from blockdraft.decoding.engine import DecodingEngine
from blockdraft.errors import BlockdraftError, InputError
from blockdraft.pipeline.prepare import prepare
from blockdraft.pipeline.regenerate import regenerate
from blockdraft.settings import PrepareSettings, RegenerateSettings, SamplingSettings
from blockdraft.verifiers.causal import CausalVerifier
from blockdraft.verifiers.loading import load_verifier, save_folder
from conftest import TEMPLATE, call, tiny_verifier_of
from pipeline.openai_server import openai_server
from pipeline.test_prepare import files, write_lines

import torch  # isort: skip

LONGEST = 8
CLOSED = TEMPLATE.replace("{% endfor %}", "{% if m['role'] == 'assistant' %}<end> {% endif %}{% endfor %}")


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> CausalVerifier:
    folder, tiny = tmp_path_factory.mktemp("verifier") / "tiny", tiny_verifier_of("llama")
    with torch.no_grad():
        tiny.head_VE[[0, 2, *range(97, 128)]] = 0  # what no text shows is never the most likely
    tiny.tokenizer.chat_template = CLOSED
    save_folder(tiny, folder)
    return load_verifier(str(folder), torch.float32)


@pytest.fixture(scope="module")
def prompts(verifier: CausalVerifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of one to three questions, one of them with an example in its prompt."""
    folder = tmp_path_factory.mktemp("prompts")
    rows: list[dict[str, Any]] = [{"turns": [f"w{i} w{j}" for j in range(1 + i % 3)]} for i in range(20)]
    example = [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8", "weight": 0}]
    rows.append({"messages": [*example, {"role": "user", "content": "w9"}]})
    path = write_lines(folder / "rows.jsonl", rows)
    prepare(
        PrepareSettings(
            verifier_name_or_path=verifier.identity.name, source=(f"s={path}",), save_path=folder / "prepared",
            prompts_only=True,
        )
    )  # fmt: skip
    return folder / "prepared"


def settings_of(verifier: CausalVerifier, data: Path, folder: Path, **changes: Any) -> RegenerateSettings:
    """The test of probes (test_probe.py) asks for them; here they would be counted among the requests."""
    given = {
        "dtype": "float32",
        "max_new_tokens": LONGEST,
        "batch_size": 4,
        "probe": "endpoint" not in changes,
        **changes,
    }
    return RegenerateSettings(
        verifier_name_or_path=verifier.identity.name, data_path=data, save_path=folder, **given
    )  # fmt: skip


def replies(folder: Path) -> dict[str, list[list[int]]]:
    """Learned tokens of every text, by its id."""
    return {d.id: [d.input_ids[a:b] for a, b in d.targets] for d in read_examples(folder, "data")}


def test_every_turn_is_answered_after_the_verifiers_own_words(
    verifier: CausalVerifier, prompts: Path, tmp_path: Path
) -> None:
    result = regenerate(settings_of(verifier, prompts, tmp_path / "own"), verifier)
    assert result["documents"] == 21 and result["sources"]["s"]["kept"] == 21
    template = ChatTemplate(verifier.tokenizer, verifier.stop_ids)
    engine = DecodingEngine(verifier, None, 0, SamplingSettings(max_new_tokens=LONGEST))
    talks = [
        Conversation.from_json(text)
        for text in read_table(tmp_path / "own", "data")["conversation"].to_pylist()
    ]  # fmt: skip
    answered = 0
    for example, talk in zip(read_examples(tmp_path / "own", "data"), talks, strict=True):
        turns = [i for i, m in enumerate(talk.messages) if m["role"] == "assistant" and m.get("weight", 1)]
        assert len(example.targets) == len(turns)
        for turn, (start, end) in zip(turns, example.targets, strict=True):
            prompt = template.prompt_ids(talk.messages[:turn])
            assert prompt == example.input_ids[:start]
            (wanted,) = engine.generate([prompt], 1)
            assert example.input_ids[start:end] == wanted.tokens
            answered += 1
    assert answered == sum(1 + i % 3 for i in range(20)) + 1


def test_a_kill_and_a_rerun_give_the_clean_result(
    verifier: CausalVerifier, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regenerate(settings_of(verifier, prompts, tmp_path / "clean"), verifier)
    settings = settings_of(verifier, prompts, tmp_path / "killed")
    original, calls = DecodingEngine.generate, []

    def dies_in_the_third_batch(self: Any, asked: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(asked))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, asked, *args, **kwargs)

    monkeypatch.setattr(DecodingEngine, "generate", dies_in_the_third_batch)
    with pytest.raises(KeyboardInterrupt):
        regenerate(settings, verifier)
    (path,) = (tmp_path / "killed").iterdir()
    with contextlib.closing(Journal(path)) as journal:
        assert len(journal) == 8
    regenerate(settings, verifier)
    assert calls[3] == 4 and len(calls) == 3 + 4 + 4 + 2  # the two finished batches were not decoded again
    assert files(tmp_path / "killed") == files(tmp_path / "clean")


@pytest.mark.parametrize(
    ("name", "says"),
    [("{}", "the replies of an unfinished run are damaged (file is not a database); delete this file"),
     (".replies.0123.jsonl", "an earlier version began this run; finish it with that version, or delete this file")],
)  # fmt: skip
def test_a_run_that_cannot_be_resumed_is_one_line_and_stays(
    verifier: CausalVerifier, prompts: Path, tmp_path: Path, name: str, says: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    settings = settings_of(verifier, prompts, tmp_path / "d")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(DecodingEngine, "generate", dies)
        regenerate(settings, verifier)
    (own,) = (tmp_path / "d").iterdir()
    path = own.with_name(name.format(own.name))
    path.write_text('{"id": "s:1", "turn": 1, "tokens": [5], "refused": null}\n' * 200)
    before = path.read_bytes()
    command = ("regenerate", "--verifier-name-or-path", verifier.identity.name, "--dtype", "float32", "--data-path",
               str(prompts), "--save-path", str(tmp_path / "d"), "--max-new-tokens", str(LONGEST), "--batch-size",
               "4")  # fmt: skip
    code, _, err = call(capsys, *command)
    assert code == 2 and err.splitlines()[-1].startswith(f"blockdraft: --save-path: {path}: {says}")
    assert path.read_bytes() == before


def test_the_same_request_is_read_and_another_refused(
    verifier: CausalVerifier, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = regenerate(settings_of(verifier, prompts, tmp_path / "d"), verifier)
    monkeypatch.setattr(DecodingEngine, "generate", None)  # reading must not decode
    assert regenerate(settings_of(verifier, prompts, tmp_path / "d"), verifier) == json.loads(json.dumps(made))
    for change in ({"max_new_tokens": 9}, {"temperature": 1.0}, {"batch_size": 5}, {"drop_truncated": True}):
        with pytest.raises(InputError, match="choose another folder or delete this one"):
            regenerate(settings_of(verifier, prompts, tmp_path / "d", **change), verifier)


def test_data_of_another_tokenizer_or_template_are_refused(
    verifier: CausalVerifier, prompts: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    save_folder(verifier, other)
    config = other / "chat_template.jinja"
    config.write_text(config.read_text() + " ")
    with pytest.raises(InputError, match="prepared with another chat template"):
        regenerate(
            dataclasses.replace(settings_of(verifier, prompts, tmp_path / "d"), verifier_name_or_path=str(other))
        )


def test_replies_cut_short_are_counted_or_left_out(verifier: CausalVerifier, prompts: Path, tmp_path: Path) -> None:
    kept = regenerate(settings_of(verifier, prompts, tmp_path / "kept"), verifier)["sources"]["s"]
    left = regenerate(
        settings_of(verifier, prompts, tmp_path / "left", drop_truncated=True, max_reject_share=1.0), verifier
    )["sources"]["s"]
    assert 0 < kept["finish"]["length"] < 21
    assert left["rejected"] == {"reply cut short": kept["finish"]["length"]}
    assert set(replies(tmp_path / "left")) < set(replies(tmp_path / "kept"))


@pytest.mark.parametrize("vllm", [True, False])
def test_a_server_writes_what_this_process_writes(
    verifier: CausalVerifier, prompts: Path, tmp_path: Path, vllm: bool
) -> None:
    """Also one that gives text only: it is encoded anew. Faults that pass are tried again."""

    def fault(text: str, times: int) -> str | None:
        return {1: "500", 2: "drop", 3: "429"}.get(times) if text in ("w1 w0", "w4 w1", "w9") else None

    regenerate(settings_of(verifier, prompts, tmp_path / "here", batch_size=1), verifier)
    with openai_server(verifier, fault, vllm) as (url, server):
        settings = settings_of(verifier, prompts, tmp_path / "there", endpoint=url, concurrency=5, max_retries=3)
        regenerate(settings)
    assert replies(tmp_path / "there") == replies(tmp_path / "here")
    assert sorted(server.seen.values())[-4:] == [1, 4, 4, 4] and 2 <= server.most_at_once <= 5
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"documents.parquet", RECORD, REJECTS}


@pytest.mark.parametrize("kind", ["hang", "drip", "junk", "empty"])
def test_no_answer_in_time_and_none_that_is_whole_are_asked_for_again(
    verifier: CausalVerifier, prompts: Path, tmp_path: Path, kind: str
) -> None:
    def fault(text: str, times: int) -> str | None:
        return kind if times == 1 and text == "w3 w0" else None

    with openai_server(verifier, fault) as (url, server):
        regenerate(settings_of(verifier, prompts, tmp_path / "d", endpoint=url, request_timeout=3.0))
    assert sum(server.seen.values()) == len(server.seen) + 1


def test_a_server_that_fails_for_good_loses_nothing(verifier: CausalVerifier, prompts: Path, tmp_path: Path) -> None:
    sick = [True]

    def fault(text: str, _: int) -> str | None:
        return "503" if sick[0] and text == "w9" else None

    with openai_server(verifier, fault) as (url, server):
        settings = settings_of(verifier, prompts, tmp_path / "d", endpoint=url, concurrency=2, max_retries=1)
        with pytest.raises(BlockdraftError, match=r"got no reply after 2 tries .* the same command goes on from there"):
            regenerate(settings)
        before = sum(server.seen.values()) - 2
        sick[0] = False
        result = regenerate(settings)
    assert result["documents"] == 21
    asked = sum(server.seen.values()) - before - 2
    assert before > 0 and before + asked == len(server.seen)  # no request that was answered was made again


@pytest.mark.slow
def test_a_killed_client_goes_on_without_losing_or_repeating(
    verifier: CausalVerifier, prompts: Path, tmp_path: Path
) -> None:
    def fault(_: str, __: int) -> None:
        if sum(server.seen.values()) == 6 and child.pid is not None:
            os.kill(child.pid, signal.SIGKILL)

    with openai_server(verifier, fault) as (url, server):
        settings = settings_of(verifier, prompts, tmp_path / "d", endpoint=url, concurrency=1)
        child = multiprocessing.get_context("spawn").Process(target=regenerate, args=(settings,))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL and sum(server.seen.values()) == 6
        result = regenerate(settings)
    assert result["documents"] == 21
    assert sum(server.seen.values()) <= len(server.seen) + 1  # at most the one that was under way


def test_what_a_server_will_never_answer_is_left_out_by_name(
    verifier: CausalVerifier, prompts: Path, tmp_path: Path
) -> None:
    def fault(text: str, _: int) -> str | None:
        return "400" if text in ("w4 w1", "w9") else None

    with openai_server(verifier, fault) as (url, server):
        result = regenerate(settings_of(verifier, prompts, tmp_path / "d", endpoint=url))
    assert result["documents"] == 19
    assert result["sources"]["s"]["rejected"] == {"the server refuses it": 2}
    rows = [json.loads(line) for line in (tmp_path / "d" / REJECTS).read_text().splitlines()]
    assert {row["reason"] for row in rows} == {"the server refuses it"} and "fault 400" in rows[0]["detail"]
    assert max(server.seen.values()) == 1
    with (
        openai_server(verifier, fault) as (url, _),
        pytest.raises(BlockdraftError, match=r"--max-reject-share: 0.05: 2 of"),
    ):
        regenerate(settings_of(verifier, prompts, tmp_path / "e", endpoint=url, max_reject_share=0.05))


def test_a_server_of_another_template_or_without_a_key_stops_the_run(
    verifier: CausalVerifier, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = load_verifier(verifier.identity.name, torch.float32)
    other.tokenizer.chat_template = "w5 " + other.tokenizer.chat_template
    with openai_server(other) as (url, _), pytest.raises(BlockdraftError, match="does not write the verifier's prompt"):
        regenerate(settings_of(verifier, prompts, tmp_path / "d", endpoint=url))
    with openai_server(verifier, key="secret") as (url, _):
        with pytest.raises(BlockdraftError, match=r"refuses every request .401.*OPENAI_API_KEY"):
            regenerate(settings_of(verifier, prompts, tmp_path / "e", endpoint=url))
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert regenerate(settings_of(verifier, prompts, tmp_path / "e", endpoint=url))["documents"] == 21
    with pytest.raises(InputError, match="no OpenAI-compatible server answers there"):
        regenerate(settings_of(verifier, prompts, tmp_path / "f", endpoint="http://127.0.0.1:9"))


@pytest.mark.slow
def test_samples_follow_the_seed_whatever_the_order_of_answers(
    verifier: CausalVerifier, prompts: Path, tmp_path: Path
) -> None:
    found = []
    for name, concurrency, seed in (("a", 1, 3), ("b", 6, 3), ("c", 6, 4)):
        with openai_server(verifier) as (url, _):
            settings = settings_of(
                verifier, prompts, tmp_path / name, endpoint=url, concurrency=concurrency, temperature=1.5, seed=seed
            )
            regenerate(settings)
        found.append(replies(tmp_path / name))
    assert found[0] == found[1] != found[2]
    own = []
    for name, seed in (("d", 3), ("e", 3), ("f", 4)):
        regenerate(settings_of(verifier, prompts, tmp_path / name, temperature=1.5, seed=seed), verifier)
        own.append(replies(tmp_path / name))
    assert own[0] == own[1] != own[2]
