from enum import StrEnum
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field
from pydantic_settings import CliSuppress

from ampd.errors import UserError
from ampd.settings import GraphSettings, Names, Settings, parse_settings


class _Sample(Settings):
    """Says what it is for."""

    rate: float | None = Field(None, gt=0, description="Sessions per second.")
    name: str = Field("a", validation_alias="dyn_name", description="As in Dynamo.")
    needed: int = Field(description="No default.")


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPD_RATE", "4")
    monkeypatch.setenv("DYN_NAME", "b")
    assert parse_settings(_Sample, ["--needed", "1"], "x").rate == 4
    sample = parse_settings(_Sample, ["--needed", "1", "--rate", "2", "--dyn-name", "c"], "x")
    assert (sample.rate, sample.name) == (2, "c")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--needed", "1", "--rate", "-1"], r"x: --rate: Input should be greater than 0 \(given: '-1'\)"),
        (["--needed", "1", "--bogus"], "x: unrecognized arguments: --bogus"),
        (["--need", "1"], "x: unrecognized arguments"),
        ([], "x: --needed is missing"),
    ],
)
def test_a_wrong_call_is_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        parse_settings(_Sample, argv, "x")
    assert "\n" not in str(raised.value)


class _Configured(Settings):
    """In topics."""

    topics: ClassVar = {"rate": "load", "name": "the rest"}

    rate: float = 1.0
    name: str = Field("a", validation_alias="dyn_name")
    is_on: bool = False


def test_flags_win_over_the_file_and_the_file_over_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml, yaml = tmp_path / "c.toml", tmp_path / "c.yaml"
    toml.write_text('rate = 2.0\nname = "b"\nis-on = true\n')
    yaml.write_text("rate: 2\nname: b\nis_on: yes\n")
    monkeypatch.setenv("AMPD_RATE", "4")
    for file in (toml, yaml):
        found = parse_settings(_Configured, ["--config", str(file)], "x")
        assert (found.rate, found.name, found.is_on) == (2.0, "b", True)
        found = parse_settings(_Configured, [f"--config={file}", "--rate", "3", "--dyn-name", "c", "--no-is-on"], "x")
        assert (found.rate, found.name, found.is_on) == (3.0, "c", False)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.toml", "rat = 1", "unknown setting 'rat'; did you mean 'rate'?"),
        ("c.toml", "rate = ", "Invalid value"),
        ("c.toml", "rate = 'x'", "--rate: "),
        ("c.yaml", "rate: [", "while parsing"),
        ("c.yaml", "words", "x: --config"),
        ("missing/c.yaml", None, "No such file"),
    ],
)
def test_a_wrong_file_is_one_line(name: str, text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        parse_settings(_Configured, ["--config", str(tmp_path / name)], "x")
    assert message in str(caught.value)


def test_help_shows_flags_by_topic(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(_Configured, ["--help"], "x")
    text = capsys.readouterr().out
    places = [
        text.index(words) for words in ("  --config FILE", "load:", "  --rate float", "the rest:", "  --is-on, --no")
    ]
    assert places == sorted(places)


class _Secretive(Settings):
    """A secret, and a URL that may have one."""

    api_key: CliSuppress[str | None] = Field(None, description="Secret.")
    place: str = Field("", description="A URL.")


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--api-key", "k-123"], "--api-key shows a secret to every user of this machine: set AMPD_API_KEY instead"),
        (["--api-key=k-123"], "--api-key shows a secret to every user of this machine: set AMPD_API_KEY instead"),
        (["--place", "redis://a:k-123@b"], "--place shows a password to every user of this machine: set AMPD_PLACE"),
        (["--place=redis://:k-123@b"], "--place shows a password to every user of this machine: set AMPD_PLACE"),
        (["--place=s://a/b?sentinel_password=k-123"], "--place shows a password to every user of this machine"),
    ],
)
def test_a_secret_on_the_command_line_is_warned_about_once_and_not_repeated(
    argv: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = parse_settings(_Secretive, argv, "x")
    assert "k-123" in f"{settings.api_key} {settings.place}", "it counts in this version"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"x: {shown}")
    assert "k-123" not in line


@pytest.mark.parametrize("argv", [[], ["--place", "redis://b/1"], ["--place=redis://user@b"]])
def test_a_secret_in_the_environment_causes_no_warning(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AMPD_API_KEY", "k-123")
    assert parse_settings(_Secretive, argv, "x").api_key == "k-123"
    assert capsys.readouterr().err == ""


def test_the_flag_of_a_secret_is_not_offered(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(_Secretive, ["--help"], "x")
    text = capsys.readouterr().out
    assert "--place" in text
    assert "api-key" not in text


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValueError, match="extra"):
        _Sample(needed=1, other=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("model", [GraphSettings])
def test_every_field_says_what_it_is_for(model: type[Settings]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []


class _Aliased(Settings):
    """A flag that is a word of Python."""

    as_json: bool = Field(False, validation_alias="json", description="Print JSON.")


def test_a_field_with_an_alias_has_no_flag_by_its_python_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(_Aliased, ["--help"], "tool")
    text = capsys.readouterr().out
    assert "--json, --no-json" in text
    assert "as-json" not in text
    assert parse_settings(_Aliased, ["--json"], "tool").as_json
    assert not parse_settings(_Aliased, ["--no-json"], "tool").as_json
    with pytest.raises(UserError, match="--as-json"):
        parse_settings(_Aliased, ["--as-json"], "tool")
    assert _Aliased(as_json=True).as_json


class Colour(StrEnum):
    DARK_RED = "dark-red"
    BLUE = "blue"


class Painting(Settings):
    """Choices."""

    known_names: ClassVar = {"brush": lambda: ("flat-brush", "fan-brush")}

    brush: str = Field("flat-brush", description="100 % of the paint is put on with it.")
    canvas: str | None = Field(None, description="What to paint on; default: paper.")
    colour: Colour = Field(Colour.DARK_RED, description="What to paint with.")


def test_help_shows_choices_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(Painting, ["--help"], "paint")
    text = capsys.readouterr().out
    assert "{dark-red,blue}" in text
    assert "(default: dark-red)" in text
    assert parse_settings(Painting, ["--colour", "dark-red"], "paint").colour is Colour.DARK_RED


def _broken() -> tuple[str, ...]:
    raise UserError("a module of the user's own cannot be imported")


class Framed(Painting):
    """Choices of its own, and those of its base."""

    known_names: ClassVar = {"frame": _broken}

    frame: str = Field("", description="Around it.")


@pytest.mark.parametrize("model", [Painting, Framed])
def test_help_lists_the_names_that_are_known_at_run_time(
    model: type[Settings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        parse_settings(model, ["--help"], "paint")
    text = " ".join(capsys.readouterr().out.split())
    assert "100 % of the paint is put on with it. Known: flat-brush, fan-brush. (default: flat-brush)" in text
    assert "default: paper." in text
    assert "(default: None)" not in text
    assert "(default: )" not in text


def test_help_breaks_no_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in range(60, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit):
            parse_settings(Painting, ["--help"], "paint")
        assert not [line for line in capsys.readouterr().out.splitlines() if line.endswith("-")]


class _Numbers(Settings):
    """Numbers of all kinds."""

    count: int = Field(0, description="Whole.")
    seconds: float = Field(0.0, description="Not whole.")
    longest: float = Field(float("inf"), allow_inf_nan=True, description="May be infinite.")
    seed: int = Field(0, description="Any whole number.")


@pytest.mark.parametrize("given", ["1" + "0" * 400, "-1" + "0" * 400, "1000000000001"])
def test_a_whole_number_beyond_all_use_is_one_line(given: str) -> None:
    with pytest.raises(UserError, match=r"x: --count: .*up to 1e12"):
        parse_settings(_Numbers, [f"--count={given}"], "x")


@pytest.mark.parametrize("given", ["1e308", "-1e308", "1.1e9", "5e-324", "-1e-10", "1" + "0" * 300])
@pytest.mark.parametrize("flag", ["seconds", "longest"])
def test_a_number_beyond_all_use_is_one_line(flag: str, given: str) -> None:
    with pytest.raises(UserError, match=f"x: --{flag}: .*between 1e-9 and 1e9"):
        parse_settings(_Numbers, [f"--{flag}={given}"], "x")


def test_all_usual_numbers_are_taken() -> None:
    given = ["--count=1000000000000", "--seconds=0", "--longest=inf", f"--seed={10**30}"]
    numbers = parse_settings(_Numbers, given, "x")
    assert (numbers.count, numbers.seconds, numbers.longest, numbers.seed) == (10**12, 0, float("inf"), 10**30)


def test_infinity_is_refused_unless_it_is_allowed() -> None:
    for given in ("1e400", "inf"):
        with pytest.raises(UserError, match="x: --seconds: Input should be a finite number"):
            parse_settings(_Numbers, [f"--seconds={given}"], "x")


class Named(Settings):
    """Has names."""

    model_name: Names = Field([], description="names")


@pytest.mark.parametrize(
    ("flags", "variable", "names"),
    [
        (["--model-name", "a", "--model-name", "b"], "c", ["a", "b"]),
        (["--model-name=a,b"], None, ["a", "b"]),
        ([], "c,d", ["c", "d"]),
        ([], None, []),
    ],
)
def test_a_flag_may_be_repeated(
    flags: list[str], variable: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("AMPD_MODEL_NAME", variable)
    assert parse_settings(Named, flags, "p").model_name == names
