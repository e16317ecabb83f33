"""A server that answers as vLLM does where it gives hidden states, and as badly as it is told to."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from blockdraft.verifiers.causal import CausalVerifier

_ONE = threading.Lock()  # a verifier of ours computes one thing at a time
Change = Callable[[dict[str, torch.Tensor], dict[str, Any], Path], None]


@dataclass
class StatesServer:
    """Answers with the states of a verifier, one file a request in a folder.

    Attributes:
        change: what happens to tensors, answer and file before they are sent; None: nothing.
        asked: numbers of tokens of the requests so far.
    """

    verifier: CausalVerifier
    folder: Path
    ids: tuple[int, ...]
    model: str = "tiny"
    change: Change | None = None
    status: int = 200
    longest: int = 128
    asked: list[int] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""
    _busy: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def models(self) -> dict[str, Any]:
        return {"data": [{"id": self.model, "owned_by": "vllm", "max_model_len": self.longest}]}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self._busy += 1
            self.asked.append(len(body["prompt"]))
            self.most_at_once = max(self.most_at_once, self._busy)
            number = len(self.asked)
        tokens = torch.tensor(body["prompt"])
        with _ONE:
            (raw,) = self.verifier.states([tokens], self.ids)
            chosen = int(self.verifier.greedy(raw.final[-1:])[0])
        path = self.folder / f"cmpl-{number}.safetensors"
        tensors = {"hidden_states": raw.taps.clone(), "token_ids": tokens}
        answer: dict[str, Any] = {
            "choices": [{"token_ids": [chosen], "prompt_token_ids": body["prompt"]}],
            "kv_transfer_params": {"hidden_states_path": str(path)},
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.change is not None:
            self.change(tensors, answer, path)
        if not path.exists():
            save_file(tensors, path)
        with self._lock:
            self._busy -= 1
        return answer

    @contextlib.contextmanager
    def running(self, port: int = 0) -> Iterator[StatesServer]:
        """Listen while the block runs; on a port that was listened on before, if it is named."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _send(self, found: dict[str, Any], known: bool = True) -> None:
                content = json.dumps(found).encode()
                self.send_response(outer.status if known else 404)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self) -> None:
                self._send(outer.models())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                known = body["model"] == outer.model
                self._send(outer.complete(body) if outer.status == 200 and known else {"error": "told to"}, known)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
