"""Settings of every command: pydantic models whose fields are at once flags, environment variables and documentation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

from ampd.errors import RunError, UserError


class Settings(BaseSettings):
    """Base of all settings: `--flag-name` on the command line, `AMPD_FLAG_NAME` in the environment.

    A field with the alias `dyn_x` is `--dyn-x` and `DYN_X`, as in Dynamo's own workers.
    """

    model_config = SettingsConfigDict(
        env_prefix="AMPD_",
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        populate_by_name=True,
        frozen=True,
    )


SettingsT = TypeVar("SettingsT", bound=Settings)


def parse_settings(model: type[SettingsT], argv: Sequence[str], prog: str) -> SettingsT:
    """Build settings from flags, then environment, then defaults.

    Raises:
        UserError: an unknown flag or a value that does not fit, as one line.
    """
    try:
        source = _OneLineCli(model, cli_prog_name=prog, cli_parse_args=list(argv))
        return model(_cli_settings_source=source)
    except ValidationError as error:
        raise UserError(f"{prog}: {_first_line(error)}") from None
    except SettingsError as error:
        raise UserError(f"{prog}: {' '.join(str(error).split())}") from None


def run_command(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run a command's body with the exit codes of the `ampd` command: 0 done, 1 failed, 2 wrong call or input."""
    try:
        return command(argv)
    except UserError as error:
        print(f"ampd: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"ampd: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class _OneLineCli(CliSettingsSource[Any]):
    """The command-line source, with argparse's errors as one line instead of a usage page."""

    def __init__(self, settings_cls: type[BaseSettings], **kwargs: Any) -> None:
        super().__init__(settings_cls, **kwargs)

    def _connect_root_parser(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super()._connect_root_parser(*args, **kwargs)


def _first_line(error: ValidationError) -> str:
    detail = error.errors()[0]
    name = ".".join(str(part) for part in detail["loc"]).replace("_", "-")
    if detail["type"] == "missing":
        return f"--{name} is missing"
    given = detail.get("input")
    return f"--{name}: {detail['msg']} (given: {given!r})"


def fail(message: str) -> NoReturn:
    """Raise a `UserError`; for expressions."""
    raise UserError(message)
