"""Docstrings name what is there: every entry of "Args" is a parameter, every entry of "Attributes" a field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "blockdraft"
SECTION = re.compile(r"^(?P<section>Args|Attributes):\n(?P<entries>(?: {4,}\S.*\n)+)", re.M)
ENTRY = re.compile(r"^ {4}(\w[\w, ]*):", re.M)


def described(docstring: str, section: str) -> list[str]:
    """Names that a section of a cleaned docstring describes; `a, b: ...` describes two."""
    sections = [found["entries"] for found in SECTION.finditer(docstring + "\n") if found["section"] == section]
    return [name for entries in sections for names in ENTRY.findall(entries) for name in names.split(", ")]


def fields(node: ast.ClassDef) -> set[str]:
    """What a class has: its annotations, methods, and what its methods set on self."""
    found = {
        child.target.id
        for child in node.body
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    }
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef):
            found |= {child.name}
        if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id in ("self", "cls"):
            found |= {child.attr}
    return found


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return {argument.arg for argument in every if argument is not None}


def wrong() -> Iterator[str]:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                text = ast.get_docstring(node) or ""
                init = next((c for c in node.body if isinstance(c, ast.FunctionDef) and c.name == "__init__"), None)
                known = (
                    parameters(node)
                    if not isinstance(node, ast.ClassDef)
                    else parameters(init)
                    if init
                    else fields(node)
                )
                for name in described(text, "Args"):
                    if name not in known:
                        yield f"{path.relative_to(SOURCE)}: {node.name}: {name} is no argument"
                for name in described(text, "Attributes") if isinstance(node, ast.ClassDef) else []:
                    if name not in fields(node):
                        yield f"{path.relative_to(SOURCE)}: {node.name}: {name} is no attribute"


def test_what_docstrings_describe_is_there() -> None:
    assert not list(wrong())


def test_the_check_can_fail() -> None:
    text = "Do.\n\nArgs:\n    a: one\n        more: not\n    b, c: two\n\nRaises:\n    X: no"
    assert described(text, "Args") == ["a", "b", "c"]
