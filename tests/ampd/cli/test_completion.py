"""What `ampd completion` prints completes commands and flags."""

import subprocess

import pytest

from ampd.cli import completion
from ampd.errors import UserError

HELPS = {
    "": "usage: ampd COMMAND ...\n\n  serve    start\n  trace    convert",
    "serve": "usage: serve\n\n  --decode int  see --nothing\n  --json, --no-json\n      as --tool-\n  -h, --help",
    "trace": "usage: ampd trace COMMAND ...\n\n  convert IN",
    "trace convert": "usage: convert\n\noptions:\n  --text   keep it",
}


def _helps(command: list[str]) -> str:
    return HELPS[" ".join(command)]


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        (["ampd", "s"], ["serve"]),
        (["ampd", "serve", "--"], ["--decode", "--help", "--json", "--no-json"]),
        (["ampd", "serve", "--decode", "2", "--js"], ["--json"]),
        (["ampd", "trace", "con"], ["convert"]),
        (["ampd", "trace", "convert", "--"], ["--text"]),
    ],
)
def test_bash_completes(typed: list[str], completed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.run(["bash"], _helps) == 0
    script = f"{capsys.readouterr().out}\nCOMP_WORDS=({' '.join(typed)}); COMP_CWORD={len(typed) - 1}; _ampd"
    done = subprocess.run(
        ["bash", "-c", f'{script}; echo "${{COMPREPLY[@]}}"'], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == completed


def test_the_commands_of_ampd_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.run(["fish"]) == 0
    script = capsys.readouterr().out
    assert "'__fish_seen_subcommand_from trace && __fish_seen_subcommand_from convert'" in script
    assert "--decode" in script


def test_another_shell_is_refused() -> None:
    with pytest.raises(UserError, match="bash, zsh, fish"):
        completion.run(["csh"])
