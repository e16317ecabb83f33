"""A small server of a verifier with a draft, as vLLM speaks: token ids, accepted tokens by step, counters."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from blockdraft.decoding.engine import DecodingEngine
from blockdraft.models.block_draft import BlockDraft
from blockdraft.serving.client import COUNTERS
from blockdraft.settings import SamplingSettings
from blockdraft.verifiers.base import Verifier


@contextmanager
def draft_server(verifier: Verifier, draft: BlockDraft, k: int, wrong: bool = False) -> Iterator[str]:
    """Its address, on a free port of this machine.

    Args:
        wrong: give another last token in every reply than the verifier's.
    """
    counters: Counter[str] = Counter()
    lock = threading.Lock()

    def completion(body: dict[str, Any]) -> dict[str, Any]:
        sampling = SamplingSettings(max_new_tokens=body["max_tokens"])
        with lock:
            (reply,) = DecodingEngine(verifier, draft, k, sampling).generate([body["prompt"]], 1)
            accepted = [step.accepted or 0 for step in reply.rounds]
            counters.update(drafts=len(accepted), proposed=k * len(accepted), accepted=sum(accepted))
        tokens = [*reply.tokens[:-1], reply.tokens[-1] ^ int(wrong)]
        return {
            "id": "cmpl-1",
            "choices": [{"token_ids": tokens}],
            "metrics": {"speculative_decoding": {"per_step_accepted": accepted, "num_spec_tokens": k}},
        }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/metrics":
                lines = [f'{metric}{{engine="0"}} {counters[name]}' for name, metric in COUNTERS.items()]
                self._send("\n".join(lines).encode())
            else:
                self._send(json.dumps({"data": [{"id": "the-verifier", "owned_by": "vllm"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(json.dumps(completion(body)).encode())

        def _send(self, data: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()
