from collections.abc import Callable

import pytest

from ampd.cli.main import OTHER_VARIABLES, SETTINGS, main
from ampd.errors import RunError, UserError, guarded
from ampd.settings import variables_of
from docs.reference.configuration import SECTIONS, load, settings_of
from docs.reference.environment_variables import ENVIRONMENT


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("serv", "serve"),
        ("trace convrt", "convert"),
        ("session shwo", "show"),
        ("trace stats coding-agent", "coding-agents"),
        ("simulate coding-agents --model qwen3-23b --gpu h200", "qwen3-32b"),
        ("simulate coding-agents --model qwen3-32b --gpu h2000", "h200"),
        ("simulate coding-agents --model qwen3-32b --gpu h200 --routing predictiv", "predictive"),
        ("simulate coding-agents --model qwen3-32b --gpu h200 --routing ampd(alfa=1)", "alpha"),
        ("simulate coding-agents --perf tinycpu", "tiny-cpu"),
        ("trace convert moonkake . out", "mooncake"),
        ("trace generate toolbnch --output out", "toolbench"),
        ("serve --prefil 2", "--prefill"),
        ("serve --prefil=2", "--prefill"),
    ],
)
def test_a_misspelt_name_gets_the_one_that_was_meant(
    words: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = words.split()
    argv += ["--decode", "1xTP1", "--prefill", "1xTP1"] if argv[0] == "simulate" else []
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"; did you mean {meant!r}?")


def test_a_name_like_no_other_gets_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["xyz"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_a_variable_that_nothing_reads_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AMPD_GPU_PRICE", "1")
    monkeypatch.setenv("AMPD_POLICY_MODULES", "")
    assert main(["trace", "stats", "toolbench-answers"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("AMPD_TTTF", "1")
    monkeypatch.setenv("AMPD_XYZZY_QUUX", "1")
    assert main(["trace", "stats", "toolbench-answers"]) == 0
    assert capsys.readouterr().err == "ampd: nothing reads AMPD_TTTF (did you mean 'AMPD_TTFT'?), AMPD_XYZZY_QUUX\n"


def test_the_variables_of_all_settings_are_known() -> None:
    known = {name for model in SETTINGS for name in variables_of(load(model))}
    rows = [row for section in SECTIONS for row in settings_of(load(section.model)).values()]
    assert {name for row in rows for name in row.variables if name.startswith("AMPD_")} <= known
    ours = {name for variable in ENVIRONMENT for name in variable.names if name.startswith("AMPD_")}
    assert ours == OTHER_VARIABLES


def _raise(error: BaseException) -> Callable[[], int]:
    def body() -> int:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code"), [(UserError("wrong"), 2), (RunError("failed"), 1), (KeyboardInterrupt(), 130)]
)
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(_raise(error)) == code
    assert len(capsys.readouterr().err.splitlines()) == (0 if code == 130 else 1)


def test_a_message_of_several_lines_is_printed_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(_raise(UserError("one\ntwo"))) == 2
    assert capsys.readouterr().err == "ampd: one two\n"


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_names_every_command(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert main([word]) == 0
    assert {"serve", "replay", "trace"} <= set(capsys.readouterr().out.split())


def test_without_a_command_it_is_a_wrong_call() -> None:
    assert main([]) == 2


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert main([word]) == 0
    assert capsys.readouterr().out.startswith("ampd ")
