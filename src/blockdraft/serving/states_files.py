"""Files of hidden states over HTTP, for trainers on machines that do not share the server's disk.

GET /NAME.safetensors waits for a file that is being written, and gives it; DELETE removes it.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_NAME = re.compile(r"/([\w-]+\.safetensors)", re.ASCII)
WAIT_SECONDS, _POLL_SECONDS = 1.0, 0.005


class _Files(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.folder = folder
        super().__init__(*arguments)  # type: ignore[arg-type]

    def _path(self) -> Path | None:
        found = _NAME.fullmatch(self.path)
        return self.folder / found[1] if found else None

    def _answer(self, status: int, length: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def do_GET(self) -> None:
        path, until = self._path(), time.monotonic() + WAIT_SECONDS
        while path is not None and not path.is_file() and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        if path is None or not path.is_file():
            self._answer(404)
            return
        with path.open("rb") as file:
            self._answer(200, path.stat().st_size)
            shutil.copyfileobj(file, self.wfile)

    def do_DELETE(self) -> None:
        path = self._path()
        if path is not None:
            path.unlink(missing_ok=True)
        self._answer(404 if path is None else 204)

    def log_message(self, format: str, *arguments: object) -> None:
        pass  # one line a file is nobody's interest


@contextlib.contextmanager
def served_files(folder: Path, host: str, port: int) -> Iterator[None]:
    """Serve the files of a folder while the block runs."""
    server = ThreadingHTTPServer((host, port), partial(_Files, folder))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="states", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
