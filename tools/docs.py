"""Build the docs site: reference pages from the settings, then the site in strict mode, then a look at what came out.

python tools/docs.py    # as `make docs` does

Strict mode fails on links to pages and anchors that do not exist. It does not look at pictures, at links to other
files, or at what a page would load from the network; `problems` does.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import reference

ROOT = Path(__file__).parent.parent
SITE = ROOT / "site"
# What a browser fetches by itself when it shows a page; a link waits to be clicked.
_LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}
_NOT_FETCHED = {"canonical", "next", "prev", "preconnect", "alternate"}


def main() -> int:
    reference.write(ROOT / "docs" / "reference")
    shutil.rmtree(SITE, ignore_errors=True)
    built = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=ROOT)
    if built.returncode:
        return built.returncode
    found = list(problems(SITE))
    print("\n".join(found) or f"{len(list(SITE.rglob('*.html')))} pages in {SITE.name}/", file=sys.stderr)
    return 1 if found else 0


def problems(site: Path) -> Iterator[str]:
    """What is wrong with a built site, a line each: files that are missing, and what pages load from the network."""
    for page in sorted(site.rglob("*.html")):
        parser = _Loaded()
        parser.feed(page.read_text(encoding="utf-8"))
        for target, loaded in parser.targets:
            parts = urlsplit(target)
            remote = bool(parts.scheme or parts.netloc)
            if parts.scheme == "data" or not (remote or parts.path) or (remote and not loaded):
                continue
            if remote:
                yield f"{page.relative_to(site)}: loads {target} from the network"
            elif not _is_there(site, page, unquote(parts.path)):
                yield f"{page.relative_to(site)}: {target} is not there"


def _is_there(site: Path, page: Path, path: str) -> bool:
    """Whether a page's target is part of the site; what lies beside it in a checkout will not be published."""
    found = (site / path.lstrip("/") if path.startswith("/") else page.parent / path).resolve()
    found = found / "index.html" if found.is_dir() else found
    return found.is_relative_to(site.resolve()) and found.is_file()


class _Loaded(HTMLParser):
    """Collects where a page leads, each with whether the browser loads it by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[tuple[str, bool]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        follows = tag == "a" or bool(_NOT_FETCHED & set((given.get("rel") or "").split()))
        target = given.get("href" if tag == "a" else _LOADED.get(tag, ""))
        if target:
            self.targets.append((target, not follows))


if __name__ == "__main__":
    sys.exit(main())
