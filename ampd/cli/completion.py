"""The body of `ampd completion`: completes commands and flags in a shell. The words are those of each `--help`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO

from ampd.errors import UserError

_USAGE = """usage: ampd completion SHELL

Print what completes commands and flags in a shell: bash, zsh or fish.

  bash  ampd completion bash > ~/.local/share/bash-completion/completions/ampd
  zsh   ampd completion zsh > ~/.ampd-completion, and `source ~/.ampd-completion` in ~/.zshrc after compinit
  fish  ampd completion fish > ~/.config/fish/completions/ampd.fish"""

_BASH = """_ampd() {{
  local words current=${{COMP_WORDS[COMP_CWORD]}}
  case "${{COMP_WORDS[*]:1:COMP_CWORD-1}} " in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _ampd ampd"""


def run(argv: Sequence[str], helps: Callable[[list[str]], str] | None = None) -> int:
    """Run the command."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else 2
    if argv[0] not in ("bash", "zsh", "fish") or len(argv) > 1:
        raise UserError(f"ampd completion: {' '.join(argv)!r} is no shell that it knows: bash, zsh, fish")
    words = _words([], helps or _help_of)
    print(_fish(words) if argv[0] == "fish" else _bash(words, is_zsh=argv[0] == "zsh"))
    return 0


def _words(command: list[str], helps: Callable[[list[str]], str]) -> dict[str, list[str]]:
    """What may follow a command, for it and all below it: "", "serve", "trace convert", ..."""
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
