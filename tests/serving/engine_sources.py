"""Which models the installed vLLM has, and which of them give hidden states, read from its sources.

Nothing of vLLM is imported: many of its model modules need packages that are not here.
`python tests/serving/engine_sources.py` writes `src/blockdraft/vllm_plugin/engine_models.py` anew.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import textwrap
from pathlib import Path

MODELS = "vllm.model_executor.models"
REGISTRY = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
INTERFACE = "SupportsEagle3"  # what the engine asks of a verifier's class before it asks it for hidden states
TABLE = Path(__file__).parents[2] / "src/blockdraft/vllm_plugin/engine_models.py"


@functools.cache
def engine_folder() -> Path:
    """The folder of the installed package."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def registered() -> dict[str, tuple[str, str]]:
    """Module and class by architecture, as the engine's registry lists them."""
    found: dict[str, tuple[str, str]] = {}
    for statement in parsed(f"{MODELS}.registry").body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", None) in REGISTRY:
            found |= ast.literal_eval(statement.value)
    return {
        name: (module if module.startswith("vllm.") else f"{MODELS}.{module}", class_name)
        for name, (module, class_name) in found.items()
    }


@functools.cache
def gives_hidden_states(module: str, class_name: str) -> bool:
    """Whether a class has the interface among its bases, wherever those are written."""
    if class_name == INTERFACE:
        return True
    origin = defined_in(module, class_name)
    if origin is None:
        return False
    where, definition = origin
    names = [base.value if isinstance(base, ast.Subscript) else base for base in definition.bases]
    return any(gives_hidden_states(where, base.id) for base in names if isinstance(base, ast.Name))


@functools.cache
def defined_in(module: str, class_name: str) -> tuple[str, ast.ClassDef] | None:
    """The module that defines a class that another one names, and the definition; None outside of the engine."""
    classes, imports = names_of(module)
    if class_name in classes:
        return module, classes[class_name]
    found = (defined_in(origin, name) for origin, name in imports.get(class_name, ()))
    return next((each for each in found if each is not None), None)


@functools.cache
def names_of(module: str) -> tuple[dict[str, ast.ClassDef], dict[str, list[tuple[str, str]]]]:
    """Classes that a module defines, and modules and names behind what it imports."""
    classes: dict[str, ast.ClassDef] = {}
    imports: dict[str, list[tuple[str, str]]] = {}
    tree = parsed(module)
    # Imports may stand in branches for a platform or a type checker.
    statements: list[ast.stmt] = [] if tree is None else list(tree.body)
    while statements:
        node = statements.pop(0)
        if isinstance(node, ast.ClassDef):
            classes[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                imports.setdefault(alias.asname or alias.name, []).append((absolute(module, node), alias.name))
        elif isinstance(node, (ast.If, ast.Try)):
            statements += [*node.body, *node.orelse]
    return classes, imports


def absolute(module: str, node: ast.ImportFrom) -> str:
    """The module that an import in another one names."""
    if not node.level:
        return node.module or ""
    package = module if path_of(module).name == "__init__.py" else module.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{node.module}" if node.module else package


def path_of(module: str) -> Path:
    """The file of a module of the engine."""
    base = engine_folder().parent.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


@functools.cache
def parsed(module: str) -> ast.Module | None:
    """A module's syntax tree; None where the engine has no such file."""
    path = path_of(module)
    if not module.startswith("vllm") or not path.is_file():
        return None
    return ast.parse(path.read_text(encoding="utf-8"))


def classified() -> dict[str, set[str]]:
    """Architectures by what the engine does for a draft: "states", "no states", or "backend" (transformers' own)."""
    found: dict[str, set[str]] = {"states": set(), "no states": set(), "backend": set()}
    for name, (module, class_name) in registered().items():
        if module == f"{MODELS}.transformers":
            found["backend"].add(name)
        else:
            found["states" if gives_hidden_states(module, class_name) else "no states"].add(name)
    return found


def main() -> None:
    """Write the table."""
    found = classified()
    parts = [
        '"""Models of vLLM 0.32 by architecture. Written by tests/serving/engine_sources.py; do not edit."""',
    ]
    for name, key, meaning in (
        ("STATES", "states", "the engine's class gives hidden states"),
        ("NO_STATES", "no states", "the engine's class gives none"),
        ("BACKEND", "backend", "the engine runs transformers' class, which gives them from the first layer on"),
    ):
        words = textwrap.fill(" ".join(sorted(found[key])), 118, break_long_words=False)
        parts.append(f'# {meaning[0].upper()}{meaning[1:]}.\n{name} = frozenset(\n    """\n{words}\n""".split()\n)')
    TABLE.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
