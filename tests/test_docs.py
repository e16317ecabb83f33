"""The docs site: every flag has its entry, every page is in the navigation, and the check of a built site can fail."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from blockdraft.cli.main import make_app
from blockdraft.cli.verbs import VERBS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "tools"))

import docs  # noqa: E402
import reference  # noqa: E402


@pytest.mark.parametrize("name", VERBS)
def test_a_page_lists_the_flags_of_help(name: str) -> None:
    command: Any = typer.main.get_command(make_app()).commands[name]  # type: ignore[attr-defined]
    flags = {flag for option in command.params for flag in option.opts if flag.startswith("--")}
    listed = re.findall(r"^`(--[a-z0-9-]+)`", reference.pages()[f"{name}.md"], flags=re.MULTILINE)
    assert sorted(listed) == sorted(flags - {"--config", "--json", "--verbose", "--quiet", "--help"})


def test_a_page_says_what_a_setting_takes() -> None:
    page = reference.pages()["train.md"]
    assert "`--num-layers` <small>whole number 1 to 512, default 5</small>" in page
    assert "`--speculator-type` <small>dflash | dflare | dspark, default dflash</small>" in page
    assert "`--data-path` <small>path, **required**</small>" in page
    assert "`--sliding-window-non-causal` <small>switch, default off</small>" in page


def test_pages_of_commands_that_are_gone_are_removed(tmp_path: Path) -> None:
    (tmp_path / "gone.md").touch()
    reference.write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(reference.pages())


def entries(nav: Any) -> Iterator[str]:
    for entry in nav.values() if isinstance(nav, dict) else nav:
        if isinstance(entry, str):
            yield entry
        else:
            yield from entries(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    nav = list(entries(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if path.parent.name != "reference"}
    assert sorted(nav) == sorted(written | {f"reference/{name}" for name in reference.pages()})


GOOD = '<a href="other.html#x">there</a> <a href="https://example.org">a link may lead away</a> <img src="a.svg">'
BAD = {
    '<img src="b.svg">': "page.html: b.svg is not there",
    '<a href="../outside.yaml">x</a>': "page.html: ../outside.yaml is not there",
    '<script src="https://example.org/x.js"></script>': "page.html: loads https://example.org/x.js from the network",
    '<link rel="stylesheet" href="//example.org/f.css">': "page.html: loads //example.org/f.css from the network",
}


@pytest.mark.parametrize("html", [GOOD, *BAD])
def test_a_built_page_with_a_dead_or_foreign_target_is_found(tmp_path: Path, html: str) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "outside.yaml").touch()
    (site / "a.svg").touch()
    (site / "other.html").touch()
    (site / "page.html").write_text(html)
    assert list(docs.problems(site)) == ([BAD[html]] if html in BAD else [])
