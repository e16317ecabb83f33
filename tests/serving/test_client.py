"""What a client of an engine makes of answers: vLLM's own fields, counters, and failures as one line."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from blockdraft.errors import BlockdraftError, InputError
from blockdraft.serving.client import EngineClient

MODELS = {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 99}]}
METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a{b} 7"} 3.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a{b} 7"} 1e1
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 8.0 1395066363000
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 5.0
vllm:num_preemptions_total 2
"""


class Asked:
    """Attributes:
    bodies: what was posted.
    keys: the Authorization headers of everything.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()


@contextmanager
def answering(answer: Callable[[Any], None], models: Any = MODELS) -> Iterator[tuple[str, Asked]]:
    """A server that answers every POST by `answer(handler)`."""
    asked = Asked()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.keys.add(self.headers.get("Authorization"))
            is_models = self.path == "/v1/models"
            self.reply(200, json.dumps(models).encode() if is_models else METRICS.encode())

        def do_POST(self) -> None:
            asked.keys.add(self.headers.get("Authorization"))
            asked.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer(self)

        def reply(self, status: int, data: bytes, more: int = 0) -> None:
            """More: bytes that are promised and never come."""
            self.send_response(status)
            self.send_header("Content-Length", str(len(data) + more))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", asked
    finally:
        http.shutdown()
        http.server_close()


def event(*tokens: int, **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"token_ids": tokens}], **more}).encode() + b"\n\n"


def test_fields_of_vllm_go_out_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    measured = {"speculative_decoding": {"per_step_accepted": [2, 0], "num_spec_tokens": 3}}
    found = {"id": "c", "choices": [{"token_ids": [5, 6]}], "metrics": measured}
    with (
        answering(lambda handler: handler.reply(200, json.dumps(found).encode())) as (url, asked),
        EngineClient(url + "/v1/") as client,
    ):
        served = client.complete([1, 2], [9], max_tokens=4, top_k=7)
        assert (served.request, served.tokens, served.accepted) == ("c", [5, 6], [2, 0])
        assert client.num_speculative_tokens([1]) == 3
        assert (client.model, client.max_model_len) == ("m", 99)
    wanted = {"model": "m", "prompt": [1, 2], "max_tokens": 4, "top_k": 7, "stop_token_ids": [9], "min_p": 0.0,
              "return_token_ids": True, "repetition_penalty": 1.0}  # fmt: skip
    assert wanted.items() <= asked.bodies[0].items()
    assert asked.keys == {"Bearer secret"}


def test_counters_are_summed_over_engines_and_nothing_else() -> None:
    with answering(lambda _: None) as (url, _), EngineClient(url) as client:
        counters = client.counters()
    assert counters == {"drafts": 13, "proposed": 0, "accepted": 8, "preemptions": 2, "prefix_hits": 0}


def test_a_stream_gives_tokens_as_they_come() -> None:
    whole = event(1, 2) + b": keep-alive\n\n" + event() + event(3) + b"data: [DONE]\n\n"
    with answering(lambda handler: handler.reply(200, whole)) as (url, asked), EngineClient(url) as client:
        assert list(client.stream([7], [], max_tokens=3)) == [[1, 2], [3]]
    assert asked.bodies[0]["stream"] is True and asked.bodies[0]["prompt"] == [7]


@pytest.mark.parametrize(
    ("status", "data", "more", "says"),
    [
        (400, b'{"error": {"message": "too\\nlong"}}', 0, r"refused \(400\): .*too"),
        (500, b"dead", 0, r"refused \(500\): dead"),
        (200, event(1) + b'data: {"error": {"message": "engine died"}}\n\n', 0, "stopped: engine died"),
        (200, event(1), 99, "stopped: .*"),
        (200, b"data: {\n\n", 0, "stopped: "),
    ],
)
def test_what_a_server_does_not_finish_is_one_line_and_asked_once(
    status: int, data: bytes, more: int, says: str
) -> None:
    with answering(lambda handler: handler.reply(status, data, more)) as (url, asked), EngineClient(url) as client:
        with pytest.raises(BlockdraftError, match=f"^the server at {url} {says}") as found:
            list(client.stream([7], []))
        assert "\n" not in str(found.value) and found.value.exit_code == 1
        if status != 200 or more:
            with pytest.raises(BlockdraftError, match=f"^the server at {url} {says}"):
                client.complete([7], [])
    assert len(asked.bodies) == (2 if status != 200 or more else 1)


def test_a_server_that_has_gone_is_one_line() -> None:
    with answering(lambda _: None) as (url, _):
        client = EngineClient(url)
    for ask in (client.counters, lambda: client.complete([1], []), lambda: list(client.stream([1], []))):
        with pytest.raises(BlockdraftError, match=rf"^the server at {url} stopped: .+$"):
            ask()


@pytest.mark.parametrize("models", [[1], {"data": None}, {"data": ["m"]}, {"data": []}, {"error": "x"}, "text"])
def test_who_lists_no_model_is_no_server(models: Any) -> None:
    with answering(lambda _: None, models) as (url, _):
        with pytest.raises(InputError, match=f"--endpoint: {url}: no vLLM server answers there") as found:
            EngineClient(url)
        assert "\n" not in str(found.value)
