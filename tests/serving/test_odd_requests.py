"""No request ends a server with a draft, and greedy text is that of the same server without the draft.

BLOCKDRAFT_FUZZ_SECONDS is the budget of the exhaustive run (an hour by default), BLOCKDRAFT_FUZZ_SEED its seed.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from blockdraft.checkpoints.store import save_draft
from blockdraft.data.table import read_examples
from blockdraft.decoding.engine import DecodingEngine
from blockdraft.pipeline.serve import planned
from blockdraft.serving.client import EngineClient
from blockdraft.serving.launcher import Launch, without_draft
from blockdraft.serving.load import measure, report
from blockdraft.serving.processes import running
from blockdraft.settings import SamplingSettings, ServeSettings
from blockdraft.verifiers.causal import CausalVerifier
from blockdraft.verifiers.loading import load_verifier
from conftest import TEMPLATE, call, contract_of, free_port, tiny_draft
from serving.fixtures import SERVED_VOCAB, random_llama, served_config
from serving.odd_requests import INF, NAN, ask, bodies, fuzz, prompts

pytestmark = pytest.mark.engine

CONTEXT, K = 256, 3
ENGINE = ("--enforce-eager", "--max-num-seqs", "8", "--max-model-len", str(CONTEXT))
USUAL = [[5, 6, 7], list(range(9, 60)), [40] * 9, list(range(20, 150))]


def json_tokenizer() -> PreTrainedTokenizerFast:
    """The words of the tiny tokenizer, and those of which JSON is made: a grammar must have a way out."""
    signs = ["{", "}", '"a"', ":", "1", "2", "[", "]", ",", "true"]
    words = ["<pad>", "<end>", "<unk>", *(f"w{i}" for i in range(93 - len(signs))), *signs, "assistant"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", chat_template=TEMPLATE
    )


@dataclass(frozen=True)
class Servers:
    """The same verifier with a draft and without."""

    drafted: str
    plain: str
    verifier: CausalVerifier
    checkpoint: Path


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    root = tmp_path_factory.mktemp("servers")
    random_llama(root / "verifier", SERVED_VOCAB)
    json_tokenizer().save_pretrained(root / "verifier")
    # What vLLM takes for a request that does not say otherwise.
    habits = {"eos_token_id": 1, "repetition_penalty": 1.3, "top_k": 20, "temperature": 0.7, "do_sample": True}
    (root / "verifier" / "generation_config.json").write_text(json.dumps(habits))
    verifier = load_verifier(str(root / "verifier"), torch.float32)
    assert isinstance(verifier, CausalVerifier)
    draft = tiny_draft(verifier, served_config("dflare"), 5)
    save_draft(root / "draft", draft, contract_of(draft, verifier), torch.float32, {})
    plans = [serve_plan(root / "draft"), without_draft(serve_plan(root / "draft"), free_port())]
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:  # both start at once
        up = [pool.submit(stack.enter_context, running(plan, root / f"{i}.log")) for i, plan in enumerate(plans)]
        for each in up:
            each.result()
        yield Servers(plans[0].url, plans[1].url, verifier, root / "draft")


def serve_plan(checkpoint: Path) -> Launch:
    return planned(
        ServeSettings(checkpoint=checkpoint, dtype="float32", port=free_port(), k=K, engine_arguments=ENGINE)
    )


def test_a_request_with_top_k_alone_does_not_end_the_server(servers: Servers) -> None:
    """The engine took the maximum of nothing in the prompt's step."""
    with httpx.Client(base_url=servers.drafted, timeout=300, trust_env=False) as http:
        for fields in ({"top_k": 5}, {"top_k": 5, "top_p": 0.5}, {"top_k": 1, "seed": 3, "logprobs": 2, "n": 2}):
            body = {"prompt": "w5 w6", "max_tokens": 4, "temperature": 1, **fields}
            assert ask(http, "/v1/completions", body).status == 200
        assert http.get("/health").is_success


@pytest.mark.parametrize("field", ["top_k", "seed", "max_tokens", "logprobs"])
def test_numbers_beyond_64_bits_are_the_clients_mistake(servers: Servers, field: str) -> None:
    """With a temperature of 0 the engine forgets top_k before it sends it."""
    with httpx.Client(base_url=servers.drafted, timeout=300, trust_env=False) as http:
        for value in (10**400, -(10**20), 2**64):
            body = {"prompt": "w5 w6", "max_tokens": 4, "temperature": 1, field: value}
            assert 400 <= ask(http, "/v1/completions", body).status < 500


@pytest.mark.parametrize("value", [-INF, INF, NAN])
def test_what_is_no_number_is_the_clients_mistake(servers: Servers, value: float) -> None:
    """Beam search divided by a power of the length, whose exponent was minus infinity."""
    body = {"prompt": "w5 w6", "max_tokens": 4, "temperature": 0, "use_beam_search": True, "length_penalty": value}
    for url in (servers.drafted, servers.plain):
        with httpx.Client(base_url=url, timeout=300, trust_env=False) as http:
            assert ask(http, "/v1/completions", body).status == 400


def test_log_probabilities_of_chosen_tokens_are_rejected(servers: Servers) -> None:
    """The engine has none beside a draft, and the server looked for them."""
    body = {"prompt": USUAL[0], "max_tokens": 4, "temperature": 0, "logprobs": 1, "logprob_token_ids": [9]}
    with httpx.Client(base_url=servers.drafted, timeout=300, trust_env=False) as http:
        answer = ask(http, "/v1/completions", body)
    assert answer.status == 400 and "logprob_token_ids is not supported" in answer.said


def test_the_verifiers_generation_config_changes_nothing_that_we_ask(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parity (with the server's own K), a streamed reply, the probe and replies for data: as in this process."""
    lines = [{"prompt": f"w{n} w{n + 1} w{2 * n}"} for n in range(3, 9)]
    data, verifier = tmp_path / "prompts.jsonl", servers.verifier
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sampling = SamplingSettings(max_new_tokens=24, ignore_eos=True)
    wanted = [reply.tokens for reply in DecodingEngine(verifier, None, 0, sampling).generate(USUAL, 4)]
    with EngineClient(servers.drafted) as client:
        asked = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
        assert [client.complete(prompt, [], **asked).tokens for prompt in USUAL] == wanted
        assert [[t for piece in client.stream(p, [], **asked) for t in piece] for p in USUAL] == wanted
    draft, server = servers.checkpoint, ("--endpoint", servers.drafted)
    code, out, err = call(capsys, "parity", draft, "--dtype", "float32", *server, "--data-path", data, "--json")
    assert code == 0, err
    assert list(json.loads(out)["k"]) == [str(K)] and json.loads(out)["mismatches"] == 0
    code, _, err = call(capsys, "parity", draft, "--dtype", "float32", *server, "--data-path", data, "--k", K + 1)
    assert code == 2 and err.endswith(f"blockdraft: --k: {K + 1}: the server proposes {K}; leave --k out\n")
    name, prompts = verifier.identity.name, tmp_path / "prompts"
    prepare = ("prepare", "--verifier-name-or-path", name, "--source", f"s={data}", "--prompts-only", "--save-path")
    assert call(capsys, *prepare, prompts)[0] == 0
    own = ("regenerate", "--verifier-name-or-path", name, "--dtype", "float32", "--data-path", prompts,
           "--max-new-tokens", "24", "--save-path")  # fmt: skip
    for folder, more in (("here", ()), ("there", server)):
        code, _, err = call(capsys, *own, tmp_path / folder, *more)
        assert code == 0, err
    here, there = (read_examples(tmp_path / folder, "data") for folder in ("here", "there"))
    assert [example.input_ids for example in there] == [example.input_ids for example in here]


def test_a_streamed_reply_has_no_count_of_rounds(servers: Servers, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("generate", servers.checkpoint, "w5 w6", "--max-new-tokens", "8", "--json")
    for more in ((), ("--engine", "vllm", "--endpoint", servers.drafted)):
        code, out, err = call(capsys, *arguments, *more)
        assert code == 0, err
        assert ("rounds" in json.loads(out)["replies"][0]) == (not more)


def test_both_servers_are_measured_under_load(servers: Servers) -> None:
    plain, drafted = (measure(url, USUAL, (1, 3)) for url in (servers.plain, servers.drafted))
    assert [rate.requests for rate in drafted] == [1, 3] and all(rate.tokens_per_second > 0 for rate in drafted)
    assert len(report(plain, drafted, K)) == 3


@pytest.mark.exhaustive
def test_self_test_measures_and_serves(servers: Servers, tmp_path: Path) -> None:
    """Two engines, one after the other."""
    port = free_port()
    command = [sys.executable, "-m", "blockdraft.cli.main", "serve", str(servers.checkpoint), "--dtype", "float32",
               "--self-test", "--port", str(port), *ENGINE]  # fmt: skip
    with running(Launch(command, {}, "", f"http://127.0.0.1:{port}"), tmp_path / "log.txt") as process:
        with EngineClient(f"http://127.0.0.1:{port}") as client:
            assert client.num_speculative_tokens(USUAL[0]) in (None, 7)  # the verifier alone comes first
        lines = iter(lambda: (tmp_path / "log.txt").read_text(), "")
        said = next(text for text in lines if "blockdraft: self-test: " in text or process.poll() is not None)
        assert len(re.findall(r"^blockdraft: self-test, requests at once \d", said, re.M)) == 4
    assert process.returncode == 0


def run(servers: Servers, seed: int, seconds: float) -> None:
    made = bodies(seed, prompts(SERVED_VOCAB, CONTEXT, (0, 1, 2)), USUAL)
    sent, wrong = fuzz(servers.drafted, servers.plain, made, seconds)
    assert not wrong, "\n".join(wrong)
    assert sent > 100
    with httpx.Client(base_url=servers.drafted, timeout=300, trust_env=False) as http:
        assert http.get("/health").is_success
        assert ask(http, "/v1/completions", {"prompt": USUAL[0], "temperature": 0}).status == 200


def test_no_request_ends_a_server_and_greedy_text_is_the_verifiers(servers: Servers) -> None:
    run(servers, seed=0, seconds=40)


@pytest.mark.exhaustive
def test_no_request_ends_a_server_in_a_long_run(servers: Servers) -> None:
    seed = int(os.environ.get("BLOCKDRAFT_FUZZ_SEED", "1"))
    run(servers, seed, float(os.environ.get("BLOCKDRAFT_FUZZ_SECONDS", "3600")))
