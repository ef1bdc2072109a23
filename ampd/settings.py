"""Settings of every command: pydantic models whose fields are flags, environment variables and docs at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from ampd.errors import UserError

PREFIX = "AMPD_"
DYNAMO_PREFIX = "DYN_"


class Settings(BaseSettings):
    """Base of all settings: `--flag-name` on the command line, `AMPD_FLAG_NAME` in the environment.

    A field declared with `validation_alias="dyn_x"` is `--dyn-x` and `DYN_X`, as in Dynamo's own workers. One with
    another alias has it as its flag and, behind `AMPD_`, as its variable.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        populate_by_name=True,
        frozen=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What was given, then our part of the environment; nothing else is read."""
        del env_settings, dotenv_settings, file_secret_settings
        return init_settings, _OwnVariables(settings_cls)


class _OwnVariables(EnvSettingsSource):
    """The environment's `AMPD_*` and `DYN_*`: pydantic looks for aliases without a prefix, and `JSON` is not ours."""

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        super().__init__(settings_cls)
        ours, dynamo = PREFIX.lower(), DYNAMO_PREFIX.lower()
        own = {name: value for name, value in self.env_vars.items() if name.startswith((ours, dynamo))}
        aliases = {name.removeprefix(ours): value for name, value in own.items() if name.startswith(ours)}
        self.env_vars = {name: value for name, value in aliases.items() if not name.startswith(dynamo)} | own


SettingsT = TypeVar("SettingsT", bound=Settings)


def parse_settings(model: type[SettingsT], argv: Sequence[str], prog: str) -> SettingsT:
    """Build settings from flags, then environment, then defaults.

    Raises:
        UserError: an unknown flag or a value that does not fit, as one line.
    """
    parser = _Parser(prog=prog, description=model.__doc__, allow_abbrev=False)
    source: CliSettingsSource[Any] = CliSettingsSource(model, root_parser=parser)
    try:
        return CliApp.run(model, cli_args=list(argv), cli_settings_source=source)
    except ValidationError as error:
        raise UserError(f"{prog}: {_first_line(error)}") from None
    except SettingsError as error:
        raise UserError(f"{prog}: {' '.join(str(error).split())}") from None


class _Parser(argparse.ArgumentParser):
    """argparse with its errors as one line for the dispatcher, not a usage page and an exit."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message} (see {self.prog} --help)")


def _first_line(error: ValidationError) -> str:
    detail = error.errors()[0]
    name = ".".join(str(part) for part in detail["loc"]).replace("_", "-")
    if detail["type"] == "missing":
        return f"--{name} is missing"
    message = detail["msg"].removeprefix("Value error, ")
    return f"--{name}: {message} (given: {detail.get('input')!r})" if name else message
