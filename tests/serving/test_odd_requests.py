"""No request ends a server with a draft, and greedy text is that of the same server without the draft.

BLOCKDRAFT_FUZZ_SECONDS is the budget of the exhaustive run (an hour by default), BLOCKDRAFT_FUZZ_SEED its seed.
"""

from __future__ import annotations

import os
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
from blockdraft.pipeline.serve import planned
from blockdraft.serving.launcher import Launch, without_draft
from blockdraft.serving.processes import running
from blockdraft.settings import ServeSettings
from blockdraft.verifiers.loading import load_verifier
from conftest import TEMPLATE, contract_of, free_port, tiny_draft
from serving.fixtures import SERVED_VOCAB, random_llama, served_config
from serving.odd_requests import ask, bodies, fuzz, prompts

pytestmark = pytest.mark.engine

CONTEXT = 256
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


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    root = tmp_path_factory.mktemp("servers")
    random_llama(root / "verifier", SERVED_VOCAB)
    json_tokenizer().save_pretrained(root / "verifier")
    verifier = load_verifier(str(root / "verifier"), torch.float32)
    draft = tiny_draft(verifier, served_config("dflare"), 5)
    save_draft(root / "draft", draft, contract_of(draft, verifier), torch.float32, {})
    plans = [serve_plan(root / "draft"), without_draft(serve_plan(root / "draft"), free_port())]
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:  # both start at once
        up = [pool.submit(stack.enter_context, running(plan, root / f"{i}.log")) for i, plan in enumerate(plans)]
        for each in up:
            each.result()
        yield Servers(plans[0].url, plans[1].url)


def serve_plan(checkpoint: Path) -> Launch:
    return planned(ServeSettings(checkpoint=checkpoint, dtype="float32", port=free_port(), engine_arguments=ENGINE))


def test_a_request_with_top_k_alone_does_not_end_the_server(servers: Servers) -> None:
    """The engine took the maximum of nothing in the prompt's step."""
    with httpx.Client(base_url=servers.drafted, timeout=300, trust_env=False) as http:
        for fields in ({"top_k": 5}, {"top_k": 5, "top_p": 0.5}, {"top_k": 1, "seed": 3, "logprobs": 2, "n": 2}):
            body = {"prompt": "w5 w6", "max_tokens": 4, "temperature": 1, **fields}
            assert ask(http, "/v1/completions", body).status == 200
        assert http.get("/health").is_success


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
