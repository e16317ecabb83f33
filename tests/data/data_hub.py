"""A hub of one data set on this machine: the routes that `datasets` and the hub's client ask, at two commits."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REPO, FILE = "org/set", "train.jsonl"
_PLACE = re.compile(rf"(?:/api)?/datasets/{REPO}(?:/(?P<what>\w[\w-]*)/(?P<revision>\w+)(?P<rest>.*))?")


class DataHub:
    """Attributes:
    commits: content of the file at each commit, the newest last.
    asked: what was downloaded, as (commit, file).
    """

    def __init__(self, commits: dict[str, str]) -> None:
        self.commits = {name: text.encode() for name, text in commits.items()}
        self.asked: list[tuple[str, str]] = []

    def answer(self, path: str, body: bytes) -> tuple[int, bytes, str]:
        """Status, content and commit."""
        found = _PLACE.fullmatch(path.partition("?")[0])
        newest = list(self.commits)[-1]
        if found is None:
            return 404, b"{}", newest
        commit = newest if found["revision"] in (None, "main") else found["revision"]
        if commit not in self.commits:
            return 404, b"{}", newest
        content = self.commits[commit]
        entry = {"type": "file", "path": FILE, "size": len(content), "oid": commit}
        if found["what"] in (None, "revision"):
            about = {"id": REPO, "sha": commit, "siblings": [{"rfilename": FILE}], "tags": [], "private": False}
            return 200, json.dumps(about).encode(), commit
        if found["what"] == "tree":
            return 200, json.dumps([entry]).encode(), commit
        if found["what"] == "paths-info":
            return 200, json.dumps([entry] if FILE.encode() in body else []).encode(), commit
        if found["what"] == "resolve" and found["rest"] == f"/{FILE}":
            self.asked.append((commit, FILE))
            return 200, content, commit
        return 404, b"{}", commit


@contextmanager
def data_hub(commits: dict[str, str]) -> Iterator[tuple[str, DataHub]]:
    """Its address and the hub, on a free port of this machine."""
    hub = DataHub(commits)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, content, commit = hub.answer(self.path, body)
            headers = {"Content-Length": str(len(content)), "ETag": f'"{commit}"', "X-Repo-Commit": commit}
            if status == 404:
                headers["X-Error-Code"] = "EntryNotFound"
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = _answer

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", hub
    finally:
        http.shutdown()
        http.server_close()
