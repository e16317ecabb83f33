"""Every setting of every verb rejects wrong values in one line that names it, from flags and from recipes."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.cli.verbs import VERBS
from blockdraft.errors import InputError
from blockdraft.settings import TrainSettings, build
from blockdraft.settings.base import spelling, type_hints, value_type
from conftest import call

GIVEN = {"checkpoint": "draft", "data_path": "data", "save_path": "out", "hidden_states_path": "states",
         "source": ["s=builtin/chat"]}  # fmt: skip
HUGE = "9" * 40
EXAMPLES = int(os.environ.get("BLOCKDRAFT_FUZZ_EXAMPLES", "300"))


def settings_of_verbs() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    for verb, described in VERBS.items():
        for field in dataclasses.fields(described.settings):
            if not field.metadata.get("unparsed"):
                yield verb, field


WALK = [pytest.param(verb, field, id=f"{verb} {field.name}") for verb, field in settings_of_verbs()]


def wrong_texts(kind: Any, field: dataclasses.Field[Any]) -> list[str]:
    """What nobody may write behind the flag of a field."""
    limits = field.metadata["range"]
    if kind in (int, float):
        wrong = ["", "abc", "nan", "inf", "-inf", HUGE, f"-{HUGE}", "1e999", "1,5", "0x10"]
        if limits is not None and (limits.at_least is not None or limits.above is not None):
            wrong.append("-1")
        if limits is not None and limits.above == 0:
            wrong.append("0")
        return wrong + ["1.5", "1e3"] * (kind is int)
    if typing.get_origin(kind) is typing.Literal:
        return ["", "abc", "AUTO", "auto ", typing.get_args(kind)[0].upper()]
    return ["", "\udc80"] if kind is str else [""]


def wrong_yaml(kind: Any, several: bool) -> list[Any]:
    """What nobody may write behind the name of a field in a recipe."""
    wrong: list[Any] = [{"a": 1}, [[1]], [None], "\0" if kind in (str, Path) else {}]
    if kind in (int, float):
        wrong += [float("nan"), float("inf"), int(HUGE), "abc", True] + [1.5] * (kind is int)
    if kind is bool:
        wrong += ["maybe", 1, 0.0]
    if kind in (str, Path) or typing.get_origin(kind) is typing.Literal:
        wrong += ["", 7, True]
    return [[value] for value in wrong] + [7, "x"] if several else [*wrong, []]


def places(verb: str, without: str) -> dict[str, Any]:
    """Values of what a verb needs, but for one field."""
    hints = type_hints(VERBS[verb].settings)
    given_values = {name: value for name, value in GIVEN.items() if name in hints and name != without}
    if "source" in given_values and not value_type(hints["source"])[1]:
        given_values["source"] = "x.gguf"
    return given_values


def rejected(verb: str, field: dataclasses.Field[Any], flags: dict[str, Any], recipe: Path | None) -> str:
    given_values = places(verb, field.name if recipe else "")
    try:
        build(VERBS[verb].settings, given_values | flags, recipe)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("verb", "field"), WALK)
def test_wrong_values_are_one_line(verb: str, field: dataclasses.Field[Any], tmp_path: Path) -> None:
    kind, several = value_type(type_hints(VERBS[verb].settings)[field.name])
    for text in [] if kind is bool else wrong_texts(kind, field):
        said = rejected(verb, field, {field.name: [text] if several else text}, None)
        assert said.startswith(f"{spelling(field)}: ") and said.isprintable(), (text, said)
    recipe = tmp_path / "recipe.yaml"
    for value in wrong_yaml(kind, several):
        recipe.write_text(yaml.safe_dump({field.name: value}))
        said = rejected(verb, field, {}, recipe)
        assert (field.name in said or spelling(field) in said) and said.isprintable(), (value, said)


def test_help_names_every_choice() -> None:
    for verb, field in settings_of_verbs():
        kind, _ = value_type(type_hints(VERBS[verb].settings)[field.name])
        missing = [word for word in typing.get_args(kind) if word not in field.metadata["help"]]
        assert typing.get_origin(kind) is not typing.Literal or not missing, (verb, field.name, missing)


@pytest.mark.parametrize("verb", VERBS)
def test_a_wrong_flag_ends_the_command_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    cls = VERBS[verb].settings
    needed = []
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING:
            needed += ["x"] if field.metadata["argument"] else [spelling(field), "x"]
    for field in dataclasses.fields(cls):
        kind, _ = value_type(type_hints(cls)[field.name])
        if field.metadata["argument"] or kind is bool:
            continue
        code, out, err = call(capsys, verb, *needed, spelling(field), wrong_texts(kind, field)[0])
        assert code == 2 and not out and err.count("\n") == 1, err
        assert err.startswith(f"blockdraft: {spelling(field)}: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        pytest.param("lr: 1\nlr: 2\n", "lr stands there twice", id="a key twice"),
        pytest.param("num-layers: 1\nnum_layers: 2\n", "num_layers: stands there twice", id="a key in two spellings"),
        pytest.param("? [1]\n: 2\n", "cannot be read", id="a list as key"),
        pytest.param("[" * 3000, "cannot be read", id="brackets without end"),
        pytest.param("lr: !!python/object:os.system x\n", "cannot be read", id="a tag"),
        pytest.param("lr: 2020-01-01\n", "must be a number", id="a date"),
        pytest.param("a: &a [*a]\n", "a", id="an alias of itself"),
        pytest.param("\x00", "cannot be read", id="a null character"),
        pytest.param("", "must be a mapping", id="nothing"),
    ],
)
def test_odd_recipes_are_one_line(tmp_path: Path, recipe: str, says: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe)
    with pytest.raises(InputError, match="--config") as caught:
        build(TrainSettings, {}, path)
    assert says in str(caught.value) and str(caught.value).isprintable()


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("lr: 1e-3\n")  # text, by YAML's own rules
    needed = {"data_path": "data", "save_path": "out"}
    assert build(TrainSettings, needed, path).lr == build(TrainSettings, needed | {"lr": "1e-3"}).lr == 1e-3


@pytest.mark.parametrize("place", ["a folder", "not UTF-8", "missing"])
def test_recipes_that_cannot_be_read(tmp_path: Path, place: str) -> None:
    path = tmp_path / "recipe.yaml"
    if place == "a folder":
        path.mkdir()
    elif place == "not UTF-8":
        path.write_bytes(b"lr: \xff\xfe")
    with pytest.raises(InputError, match="--config"):
        build(TrainSettings, {}, path)


@settings(max_examples=EXAMPLES, derandomize=True, deadline=None)
@given(text=st.text(max_size=200), kind=st.sampled_from(["yaml", "toml"]))
def test_no_recipe_is_a_traceback(tmp_path_factory: pytest.TempPathFactory, text: str, kind: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"any.{kind}"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        build(TrainSettings, {}, path)
    except InputError as error:
        assert len(str(error).splitlines()) == 1


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
_FIELDS = [(verb, field.name) for verb, field in settings_of_verbs()]


@settings(max_examples=EXAMPLES, derandomize=True, deadline=None)
@given(place=st.sampled_from(_FIELDS), value=_VALUES)
def test_any_value_in_a_recipe_is_taken_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, place: tuple[str, str], value: Any
) -> None:
    verb, name = place
    path = tmp_path_factory.getbasetemp() / "any-value.yaml"
    path.write_text(yaml.safe_dump({name: value}, allow_unicode=True), encoding="utf-8", errors="surrogatepass")
    try:
        build(VERBS[verb].settings, places(verb, name), path)
    except InputError as error:
        assert len(str(error).splitlines()) == 1
