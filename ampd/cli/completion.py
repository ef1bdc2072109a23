"""The body of `ampd completion`: completes commands and flags in a shell. The words are those of each `--help`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO

from pydantic import Field
from pydantic_settings import CliPositionalArg

from ampd.errors import UserError
from ampd.settings import Settings, parse_settings

PROG = "ampd completion"
_SHELLS = ("bash", "zsh", "fish")


class CompletionSettings(Settings):
    """Print what completes commands and flags in a shell."""

    shell: CliPositionalArg[str] = Field(
        description="bash: write it to ~/.local/share/bash-completion/completions/ampd. zsh: write it to a file that "
        "~/.zshrc sources after compinit. fish: write it to ~/.config/fish/completions/ampd.fish."
    )


_BASH = """_ampd() {{
  local words current=${{COMP_WORDS[COMP_CWORD]}}
  case "${{COMP_WORDS[*]:1:COMP_CWORD-1}} " in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _ampd ampd"""


def run(argv: Sequence[str], helps: Callable[[list[str]], str] | None = None) -> int:
    """Print the script."""
    shell = parse_settings(CompletionSettings, argv, PROG).shell
    if shell not in _SHELLS:
        raise UserError(f"{PROG}: no shell {shell!r}; known: {', '.join(_SHELLS)}")
    words = _words([], helps or _help_of)
    print(_fish(words) if shell == "fish" else _bash(words, is_zsh=shell == "zsh"))
    return 0


def _words(command: list[str], helps: Callable[[list[str]], str]) -> dict[str, list[str]]:
    """The words that may follow each command: "", "serve", "trace convert", ..."""
    text = helps(command)
    below = re.findall(r"^  ([a-z]+) ", text, re.MULTILINE) if " COMMAND ..." in text else []
    options = "".join(re.findall(r"^  +(?:-\w[^-]*, )?--.*?(?:  |$)", text, re.MULTILINE))
    found = {" ".join(command): below or sorted(set(re.findall(r"--[a-z][a-z-]*[a-z]", options)))}
    for name in below:
        found |= _words([*command, name], helps)
    return found


def _help_of(command: list[str]) -> str:
    from ampd.cli.main import main

    text = StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        main([*command, "--help"])
    return text.getvalue()


def _bash(words: Mapping[str, Sequence[str]], *, is_zsh: bool) -> str:
    # The longest command first, because "trace " also begins "trace convert ".
    longest_first = sorted(words, key=lambda command: -len(command.split()))
    cases = "\n".join(
        f'    {(command + " ").replace(" ", chr(92) + " ") if command else ""}*) words="{" ".join(words[command])}" ;;'
        for command in longest_first
    )
    script = _BASH.format(cases=cases)
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if is_zsh else script


def _fish(words: Mapping[str, Sequence[str]]) -> str:
    lines = ["complete -c ampd -n __fish_use_subcommand -f -a '" + " ".join(words[""]) + "'"]
    for command, following in words.items():
        seen = " && ".join(f"__fish_seen_subcommand_from {word}" for word in command.split())
        if seen:
            lines.append(f"complete -c ampd -n '{seen}' -a '{' '.join(following)}'")
    return "\n".join(lines)
