"""A hub of one model on this machine: the few routes that reading a verifier needs, with ranges, counting the bytes."""

from __future__ import annotations

import hashlib
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c0ffee" * 6 + "c0ff"
_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


class Hub:
    """Attributes:
    served: bytes of each file that were sent.
    revisions: what was asked for.
    """

    def __init__(self, folder: Path, repo: str, tag: str) -> None:
        self.folder, self.repo, self.known = folder, repo, {tag, COMMIT}
        self.served: Counter[str] = Counter()
        self.revisions: set[str] = set()

    def file(self, path: str) -> tuple[str, bytes] | None:
        """Name and content of what a path stands for."""
        found = _RESOLVE.fullmatch(path.partition("?")[0])
        if found is None or found["repo"] != self.repo:
            return None
        self.revisions.add(found["revision"])
        target = self.folder / found["file"]
        if found["revision"] not in self.known or not target.is_file():
            return None
        return found["file"], target.read_bytes()


@contextmanager
def hub_server(folder: Path, repo: str, tag: str) -> Iterator[tuple[str, Hub]]:
    """Its address and the hub, on a free port of this machine."""
    hub = Hub(folder, repo, tag)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            found = hub.file(self.path)
            if found is None:
                self._send(404, b'{"error": "no such entry"}', {"X-Error-Code": "EntryNotFound"}, body)
                return
            name, content = found
            headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            status, part = 200, content
            if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                start, end = int(wanted[1]), min(int(wanted[2]), len(content) - 1)
                status, part = 206, content[start : end + 1]
                headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            if body:
                hub.served[name] += len(part)
            self._send(status, part, headers, body)

        def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), "Accept-Ranges": "bytes", **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", hub
    finally:
        http.shutdown()
        http.server_close()
