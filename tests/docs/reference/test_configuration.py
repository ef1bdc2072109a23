import ast
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ampd.cli.main import COMMANDS
from ampd.errors import UserError
from ampd.settings import Settings, parse_settings
from docs.reference import configuration
from docs.reference.configuration import SECTIONS, Section, Setting
from docs.reference.environment_variables import ENVIRONMENT
from workers.engines import settings_model

_ROOT = Path(__file__).parents[3]
_ROOMS = ("ampd", "planner", "router", "workers", "workloads")
_PAGE = _ROOT / "docs" / "configuration.md"

_TOGETHER = {"workloads.replay_command:ReplaySettings": {"ttft": "--itl=1", "itl": "--ttft=1"}}
"""Settings that must be given with another one."""

_ROWS = [(section, setting) for section in SECTIONS for setting in configuration.rows_of(section)]
_NAMED_ROWS = [(section, setting) for section, setting in _ROWS if not setting.is_positional]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what the environment of the tests happens to set."""
    for name in [name for name in os.environ if name.upper().startswith(("AMPD_", "DYN_"))]:
        monkeypatch.delenv(name)


def test_the_page_is_up_to_date() -> None:
    assert _PAGE.read_text(encoding="utf-8") == configuration.render(), (
        "run: python -m docs.reference.configuration > docs/configuration.md"
    )


@pytest.mark.slow
def test_every_settings_class_of_the_code_is_on_the_page() -> None:
    assert _settings_classes() == {section.model for section in SECTIONS}


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "completion"])
def test_every_command_with_settings_is_on_the_page(command: str) -> None:
    assert any(f"{section.title} ".startswith(f"ampd {command} ") for section in SECTIONS)


def test_every_setting_says_what_it_is_for() -> None:
    assert [_name(section, setting) for section, setting in _ROWS if not setting.description] == []


def test_the_parser_takes_every_flag_of_the_table() -> None:
    for section, setting in _NAMED_ROWS:
        for flag in setting.flags:
            given, expected = _value(setting)
            argument = f"{flag}={given}"
            if setting.schema.get("type") == "boolean":
                argument, expected = flag, not flag.startswith("--no-")
            assert _read(section, setting, argument) == expected, _name(section, setting)


def test_the_parser_reads_every_variable_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for section, setting in _NAMED_ROWS:
        given, expected = _value(setting)
        for variable in setting.variables:
            with monkeypatch.context() as patch:
                patch.setenv(variable, given)
                assert _read(section, setting) == expected, _name(section, setting)


def test_the_default_of_the_table_is_what_one_gets() -> None:
    defaults = {section.title: _parsed(section) for section in SECTIONS}
    for section, setting in _NAMED_ROWS:
        if setting.is_required:
            continue
        value = getattr(defaults[section.title], setting.field)
        shown = "" if value is None else {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
        assert setting.default.strip("`") == shown, _name(section, setting)


def test_arguments_with_a_place_have_no_variable() -> None:
    placed = [(section, setting) for section, setting in _ROWS if setting.is_positional]
    assert placed
    for section, setting in placed:
        assert not setting.variables, _name(section, setting)
        arguments = ["here" if argument == setting.field else argument for argument in _required(section)]
        parsed = parse_settings(_parsed_by(section), arguments, section.title)
        assert str(getattr(parsed, setting.field)) in ("here", "['here']"), _name(section, setting)


@pytest.mark.slow
def test_variables_without_our_prefix_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _all_defaults()
    for section in SECTIONS:
        for setting in configuration.rows_of(section):
            for variable in setting.variables:
                monkeypatch.setenv(variable.removeprefix("AMPD_").removeprefix("DYN_"), "1")
    assert _all_defaults() == before


@pytest.mark.slow
def test_every_variable_that_the_code_and_the_manifests_name_is_on_the_page() -> None:
    known = {name for _, setting in _ROWS for name in setting.variables}
    known |= {name for entry in ENVIRONMENT for name in entry.names}
    files = [path for room in _ROOMS for path in (_ROOT / room).rglob("*.py")]
    files += list((_ROOT / "k8s").rglob("*.yaml"))
    named = {name for path in files for name in _variables(path)}
    assert len(named) > 10
    assert sorted(named - known) == []


def test_no_flag_is_listed_twice_among_the_other_variables() -> None:
    flags = {name for section in SECTIONS for row in configuration.rows_of(section) for name in row.variables}
    assert not flags & {name for entry in ENVIRONMENT for name in entry.names}


# -- what a section is parsed with


def _all_defaults() -> dict[str, dict[str, Any]]:
    return {section.title: _parsed(section).model_dump() for section in SECTIONS}


def _parsed(section: Section) -> Settings:
    """The settings of a command that is given no more than it must be."""
    return parse_settings(_parsed_by(section), _required(section), section.title)


def _name(section: Section, setting: Setting) -> str:
    return f"{section.title}: {setting.field}"


def _read(section: Section, setting: Setting, *arguments: str) -> Any:
    """The value of a setting that a command gets with these arguments beside those that it needs."""
    try:
        parsed = parse_settings(_parsed_by(section), [*_others(section, setting), *arguments], section.title)
    except UserError as error:
        raise AssertionError(_name(section, setting)) from error
    return getattr(parsed, setting.field)


def _parsed_by(section: Section) -> type[Settings]:
    """The model that the command really parses: a worker's is put together with its engine's."""
    if section.title.startswith("python -m workers"):
        return settings_model("modelled" if "modelled" in section.title else "sglang")
    return configuration.load(section.model)


@cache
def _required(section: Section) -> list[str]:
    """The least that must be given."""
    settings = configuration.settings_of(_parsed_by(section)).values()
    return [
        row.field if row.is_positional else f"{row.flags[0]}={_value(row)[0]}" for row in settings if row.is_required
    ]


def _others(section: Section, setting: Setting) -> list[str]:
    together = _TOGETHER.get(section.model, {}).get(setting.field)
    others = [flag for flag in _required(section) if not flag.startswith(tuple(f"{own}=" for own in setting.flags))]
    return [*others, together] if together else others


def _value(setting: Setting) -> tuple[str, Any]:
    """A value that is allowed and not the default, as it is given and as it is read."""
    schema = setting.schema
    default = setting.default.strip("`")
    if "enum" in schema:
        chosen = next(choice for choice in schema["enum"] if choice != default)
        return chosen, chosen
    kind = schema["type"]
    if kind == "array":
        return "other", ["other"]
    if kind == "boolean":
        return ("0", False) if default == "on" else ("1", True)
    if kind == "integer":
        number = int(schema.get("minimum", 1)) + 1
        return str(number), number
    if kind == "number":
        above = schema.get("exclusiveMinimum", schema.get("minimum", 0))
        below = schema.get("exclusiveMaximum", schema.get("maximum", above + 1))
        return str((above + below) / 2), (above + below) / 2
    if schema.get("format") == "path":
        return "some/place", Path("some/place")
    if setting.field == "engine_args":
        return '{"a": 1}', '{"a": 1}'
    return "other", "other"


# -- what the code says


def _settings_classes() -> set[str]:
    """All subclasses of Settings as `module:class`, found without importing the rooms."""
    bases = {
        f"{_module(path)}:{node.name}": {_last(base) for base in node.bases}
        for room in _ROOMS
        for path in (_ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    found: set[str] = set()
    names = {"Settings"}
    while more := {name for name, its in bases.items() if its & names} - found:
        found |= more
        names |= {name.partition(":")[2] for name in more}
    return found


def _module(path: Path) -> str:
    return ".".join(path.relative_to(_ROOT).with_suffix("").parts)


def _last(base: ast.expr) -> str:
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


_VARIABLE = re.compile(r"\b(?:AMPD|DYN|UCX|NIXL|SGLANG|HF|CUDA|OMP|OTEL|NCCL|XDG)_[A-Z][A-Z0-9_]*[A-Z0-9]\b")


def _variables(path: Path) -> set[str]:
    """Names of variables in a manifest, or in the strings of a program that are nothing but one."""
    text = path.read_text(encoding="utf-8")
    named = set(_VARIABLE.findall(text))
    if path.suffix == ".yaml" or not named:
        return named
    strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return {text for text in strings if isinstance(text, str) and _VARIABLE.fullmatch(text)}
