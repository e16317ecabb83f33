"""A server that speaks the OpenAI interface over the reference engine, and can be told to fail.

Real text of a real (tiny) verifier; what it adds is what no real server does on demand: refusals, delays, hang-ups.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from blockdraft.data.templates import ChatTemplate
from blockdraft.decoding.engine import DecodingEngine
from blockdraft.settings import SamplingSettings
from blockdraft.verifiers.causal import CausalVerifier

Fault = Callable[[str, int], str | None]
"""From a request's last words and how often it came (1 the first time) to a fault: a status such as "500"; "hang";
"drip", spaces without end; "drop" the connection; "junk" or "empty", an answer that is no completion."""

DRIP = b" "
ANSWERS = {"junk": b"<html>busy</html>", "empty": b'{"error": "busy", "choices": []}', "drip": DRIP}


class Server:
    """Attributes:
    seen: how often each request (its messages) came.
    vllm: give token ids, as vLLM does when asked.
    over: set at the end; a request that hangs waits for it.
    """

    def __init__(self, verifier: CausalVerifier, fault: Fault, vllm: bool, key: str | None) -> None:
        self.verifier, self.fault, self.vllm, self.key = verifier, fault, vllm, key
        self.template = ChatTemplate(verifier.tokenizer, verifier.stop_ids)
        self.seen: Counter[str] = Counter()
        self.most_at_once = self._now = 0
        self.over = threading.Event()
        self._lock = threading.Lock()

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any] | bytes] | None:
        """Status and JSON, or bytes, or a fault of the connection; None hangs up."""
        asked = json.dumps(body["messages"])
        with self._lock:
            self.seen[asked] += 1
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            fault = self.fault(body["messages"][-1]["content"], self.seen[asked])
            if fault == "drop":
                return None
            if fault in ANSWERS:
                return 200, ANSWERS[fault]
            if fault == "hang":
                self.over.wait()
            elif fault:
                return int(fault), {"error": f"fault {fault}"}
            return 200, self._decoded(body)
        finally:
            with self._lock:
                self._now -= 1

    def _decoded(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = self.template.prompt_ids(body["messages"], body.get("tools"))
        sampling = SamplingSettings(
            max_new_tokens=body["max_tokens"], temperature=body["temperature"], seed=body["seed"]
        )
        with self._lock:
            (reply,) = DecodingEngine(self.verifier, None, 0, sampling).generate([prompt], 1)
        text = self.verifier.tokenizer.decode(reply.tokens, skip_special_tokens=True)
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}, "finish_reason": reply.finish}
        found: dict[str, Any] = {"choices": [choice]}
        if self.vllm and body.get("return_token_ids"):
            choice["token_ids"], found["prompt_token_ids"] = reply.tokens, prompt
        return found


@contextmanager
def openai_server(
    verifier: CausalVerifier,
    fault: Fault = lambda *_: None,
    vllm: bool = True,
    key: str | None = None,
    models: tuple[str, ...] = ("the-verifier",),
) -> Iterator[tuple[str, Server]]:
    """Its address and the server, on a free port of this machine."""
    server = Server(verifier, fault, vllm, key)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            owner = "vllm" if server.vllm else "somebody"
            self._send(200, {"data": [{"id": name, "owned_by": owner} for name in models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
                self._send(401, {"error": "no key"})
                return
            answer = server.answer(body)
            if answer is None:
                self.close_connection = True
                self.connection.close()
            else:
                self._send(*answer)

        def _send(self, status: int, value: dict[str, Any] | bytes) -> None:
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(10**6 if value is DRIP else len(data)))
            self.end_headers()
            self.wfile.write(data)
            while value is DRIP and not server.over.wait(0.2):
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (OSError, ValueError):  # the client hung up, or we did
                self.close_connection = True

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", server
    finally:
        server.over.set()
        http.shutdown()
        http.server_close()
