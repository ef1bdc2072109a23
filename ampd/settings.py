"""Settings of the commands: pydantic models whose fields define flags, environment variables and documentation."""

from __future__ import annotations

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeAlias, TypeVar

from pydantic import AliasChoices, BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    CLI_SUPPRESS,
    BaseSettings,
    CliApp,
    CliSettingsSource,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
    YamlConfigSettingsSource,
)
from yaml import YAMLError

from ampd.documents import first_problem
from ampd.errors import UserError, did_you_mean, one_line_of
from ampd.types import MAX_WAIT, Slo

PREFIX = "AMPD_"
DYNAMO_PREFIX = "DYN_"

_DEFAULT = " (default: "
_NO_VALUES = ("None)", ")")
"""Defaults that help does not show. Where one means something, the field's description says what."""

_UNKNOWN_FLAG = "unrecognized arguments: "
"""The beginning of argparse's message."""

_CONFIG_HELP = "TOML or YAML file with settings, named as the flags are. Flags win over it, and it over variables."

_PASSWORD = re.compile(r"://[^\s/@]*:\S*@|[?&]\w*password=")
"""A part of a URL that has a password."""


_LEAST, _MOST, _MOST_WHOLE = 1e-9, 1e9, 10**12
UNUSUAL_SIZE = "the number must be 0, or between 1e-9 and 1e9 in size, and a whole one up to 1e12"
"""The end of an error line about a number that has no usual size."""


def has_usual_size(number: float) -> bool:
    """Whether a number of a setting can be computed with. Infinity can, where a setting allows it."""
    if isinstance(number, int):
        return abs(number) <= _MOST_WHOLE
    return number == 0 or math.isinf(number) or _LEAST <= abs(number) <= _MOST


class Settings(BaseSettings):
    """Base of all settings: `--flag-name` on the command line, `AMPD_FLAG_NAME` in the environment.

    A field with `validation_alias="dyn_x"` is `--dyn-x` and `DYN_X`, as in Dynamo's own workers. A field with another
    alias uses the alias as its flag and, after `AMPD_`, as its variable. A field `CliSuppress[...]` is a secret: its
    flag is not documented and causes a warning, because every user of a machine can read command lines. `known_names`
    gives the names that a field's value may have, where they are found at run time: `--help` lists them. `topics` has
    the first field of each topic: `--help` shows the fields from there on under the topic.
    """

    known_names: ClassVar[Mapping[str, Callable[[], Iterable[str]]]] = {}
    topics: ClassVar[Mapping[str, str]] = {}

    @field_validator("*", mode="after")
    @classmethod
    def _has_a_size(cls, value: Any, info: ValidationInfo) -> Any:
        """Numbers far beyond all use would overflow, or become 0 or infinite, somewhere in what is computed of them."""
        if info.field_name != "seed" and type(value) in (int, float) and not has_usual_size(value):
            raise ValueError(UNUSUAL_SIZE)
        return value

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="forbid",
        allow_inf_nan=False,
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
        """The arguments, then the variables of this project; no other source."""
        del env_settings, dotenv_settings, file_secret_settings
        return init_settings, _OwnVariables(settings_cls)


def _split(names: Any) -> Any:
    """Names of a repeated flag, of a list in a file, or separated by commas, as a variable has them."""
    given = [names] if isinstance(names, str) else names
    return [name for each in given for name in each.split(",") if name] if isinstance(given, list) else given


Names: TypeAlias = Annotated[list[str], NoDecode, BeforeValidator(_split)]
"""A flag that may be repeated."""


class _OwnVariables(EnvSettingsSource):
    """The variables `AMPD_*` and `DYN_*`. By itself pydantic reads aliases without a prefix, for example `JSON`."""

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        super().__init__(settings_cls)
        ours, dynamo = PREFIX.lower(), DYNAMO_PREFIX.lower()
        own = {name: value for name, value in self.env_vars.items() if name.startswith((ours, dynamo))}
        aliases = {name.removeprefix(ours): value for name, value in own.items() if name.startswith(ours)}
        self.env_vars = {name: value for name, value in aliases.items() if not name.startswith(dynamo)} | own


SettingsT = TypeVar("SettingsT", bound=Settings)


def parse_settings(model: type[SettingsT], argv: Sequence[str], prog: str) -> SettingsT:
    """Build settings from flags, then the file of `--config`, then environment, then defaults.

    Raises:
        UserError: an unknown flag or a value that does not fit, as one line.
    """
    parser = _Parser(prog=prog, description=model.__doc__, formatter_class=_Formatter, allow_abbrev=False)
    parser.known_names = dict(_of_bases(model, "known_names"))
    parser.add_argument("--config", metavar="FILE", help=_CONFIG_HELP)
    source = _Flags(model, root_parser=parser, add_argument_method=_ByTopic(model))
    for warning in _secrets_shown(model, argv):
        print(f"{prog}: {warning}", file=sys.stderr)
    try:
        return CliApp.run(model, cli_args=list(argv), cli_settings_source=source, **_configured(model, argv, prog))
    except ValidationError as error:
        raise UserError(f"{prog}: {first_problem(error, as_flag=True)}") from None
    except SettingsError as error:
        raise UserError(f"{prog}: {one_line_of(error)}") from None


def run_subcommand(
    prog: str, usage: str, commands: Mapping[str, Callable[[Sequence[str]], None]], argv: Sequence[str]
) -> int:
    """Run the sub-command that `argv` begins with, or print the usage; 0.

    Raises:
        UserError: there is none of this name; the known ones are listed.
    """
    if argv and argv[0] in ("-h", "--help"):
        print(usage)
        return 0
    if not argv or argv[0] not in commands:
        given = f"unknown sub-command {argv[0]!r}" if argv else "a sub-command is missing"
        known = ", ".join(commands) + (did_you_mean(argv[0], commands) if argv else "")
        raise UserError(f"{prog}: {given}; known: {known}")
    commands[argv[0]](argv[1:])
    return 0


def is_secret(field: FieldInfo) -> bool:
    """Whether a field is to be set by its variable only."""
    return CLI_SUPPRESS in field.metadata


def _secrets_shown(model: type[Settings], argv: Sequence[str]) -> Iterator[str]:
    """A warning for each flag by which a secret is on the command line. The next version refuses these flags."""
    secrets = {f"--{name.replace('_', '-')}" for name, field in model.model_fields.items() if is_secret(field)}
    flag = ""
    for argument in argv:
        if argument.startswith("--"):
            flag = argument.partition("=")[0]
        if flag in secrets and argument.startswith(flag):
            what = "shows a secret"
        elif flag and _PASSWORD.search(argument):
            what = "shows a password"
        else:
            continue
        variable = PREFIX + flag.removeprefix("--").replace("-", "_").upper()
        yield f"{flag} {what} to every user of this machine: set {variable} instead; the next version refuses it"


def _of_bases(model: type[Settings], attribute: str) -> Iterator[tuple[str, Any]]:
    """The entries of a mapping that a model and its bases have. A model's own come last."""
    for base in reversed(model.__mro__):
        yield from vars(base).get(attribute, {}).items()


def _configured(model: type[Settings], argv: Sequence[str], prog: str) -> dict[str, Any]:
    """The settings in the file of `--config`; none without the flag."""
    parser = _Parser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    path = parser.parse_known_args(argv)[0].config
    if path is None:
        return {}
    kind = TomlConfigSettingsSource if path.suffix == ".toml" else YamlConfigSettingsSource
    try:
        path.open("rb").close()  # pydantic takes a missing file for an empty one
        given = {name.replace("-", "_"): value for name, value in kind(model, path)().items()}
    except (OSError, ValueError, YAMLError, SettingsError) as error:
        raise UserError(f"{prog}: --config {path}: {one_line_of(error)}") from None
    known = {name for names in _names_of(model) for name in names}
    for name in given.keys() - known:
        raise UserError(f"{prog}: --config {path}: unknown setting {name!r}{did_you_mean(name, known)}")
    return given


def _names_of(model: type[Settings]) -> Iterator[tuple[str, ...]]:
    """The names of each field: its own, that of its flag if it has another one, and that in Dynamo."""
    for name, field in model.model_fields.items():
        alias = field.validation_alias
        aliases = alias.choices if isinstance(alias, AliasChoices) else [alias] if alias else []
        yield name, *map(str, aliases)


def variables_of(model: type[Settings]) -> set[str]:
    """The variables of this project that a model reads."""
    return {PREFIX + name.upper() for names in _names_of(model) for name in names}


class _ByTopic:
    """Adds the arguments of a model to the groups of their topics."""

    def __init__(self, model: type[Settings]) -> None:
        starts, topic = dict(_of_bases(model, "topics")), ""
        self._topics = {}
        for names in _names_of(model):
            topic = starts.get(names[0], topic)
            self._topics.update(dict.fromkeys(names, topic))
        self._groups: dict[str, Any] = {}

    def __call__(self, parser: argparse.ArgumentParser, *names: str, **options: Any) -> Any:
        topic = self._topics.get(options.get("dest", ""), "")
        if not topic:
            return parser.add_argument(*names, **options)
        if topic not in self._groups:
            self._groups[topic] = parser.add_argument_group(topic)
        return self._groups[topic].add_argument(*names, **options)


class _Flags(CliSettingsSource[Any]):
    """The flags of a model. Help shows choices as they are typed. By itself pydantic shows the names of the enum."""

    def _metavar_format_recurse(self, obj: Any) -> str:
        if isinstance(obj, type) and issubclass(obj, Enum):
            return self._metavar_format_choices([str(member.value) for member in obj])
        return super()._metavar_format_recurse(obj)

    def _get_arg_names(self, arg: Any, *args: Any, **options: Any) -> list[str]:
        """The flags of a field. A field with an alias of ours is not also a flag by its Python name."""
        alias, name = arg.field_info.validation_alias, arg.field_name
        names: list[str] = super()._get_arg_names(arg, *args, **options)
        if isinstance(alias, str) and not alias.startswith(DYNAMO_PREFIX.lower()) and alias != name:
            return [each for each in names if each != name.replace("_", "-")]
        return names

    def _help_format(self, field_name: str, field_info: FieldInfo, *args: Any, **options: Any) -> str:
        text = super()._help_format(field_name, field_info, *args, **options)
        default = field_info.default
        if not isinstance(default, Enum):
            return text
        return text.replace(f"(default: {default.name})", f"(default: {default.value})")


class _Formatter(argparse.HelpFormatter):
    """Help whose lines never end within a name."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises its errors as one line instead of printing the usage and exiting.

    Attributes:
        known_names: field -> the names that its value may have. They are asked for when help is printed.
    """

    known_names: Mapping[str, Callable[[], Iterable[str]]] = {}

    def format_help(self) -> str:
        for action in self._actions:
            text, default, value = (action.help or "").partition(_DEFAULT)
            names = self._known(action.dest)
            known = f" Known: {', '.join(names)}." if names else ""
            action.help = text + known + (default + value if value not in _NO_VALUES else "")
        return super().format_help()

    def _known(self, field: str) -> Iterable[str]:
        try:
            return self.known_names[field]() if field in self.known_names else ()
        except UserError:  # a broken module of the user's own; running the command names it
            return ()

    def error(self, message: str) -> NoReturn:
        flag = message.removeprefix(_UNKNOWN_FLAG).partition("=")[0].split(" ")[0]
        similar = did_you_mean(flag, self._option_string_actions) if message.startswith(_UNKNOWN_FLAG) else ""
        raise UserError(f"{self.prog}: {message} (see {self.prog} --help){similar}")


# -- Settings that all processes of a graph share


class GraphSettings(Settings):
    """Settings that coordinators and workers of a graph must agree on."""

    topics: ClassVar = {"namespace": "graph", "ttft": "targets and times", "session_ttl_s": "sessions and logs"}

    namespace: str = Field(
        "ampd",
        validation_alias="dyn_namespace",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        description="Dynamo namespace of the graph; also the prefix of its keys in Redis.",
    )
    state_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="Shared state: redis://, rediss:// (TLS) or unix:// of a Redis >= 6.2, or redis+sentinel://; "
        "credentials in it.",
    )
    graph_secret_file: Path | None = Field(
        None,
        description="File with secrets that coordinators and workers share, one per line: the first signs "
        "their calls, all are accepted. Default: calls are not signed, and the processes start "
        "on loopback only.",
    )
    ttft: float = Field(2.0, gt=0, description="TTFT target in seconds, for rounds that bring none of their own.")
    itl: float = Field(0.1, gt=0, description="ITL target in seconds, for rounds that bring none of their own.")
    max_wait: float = Field(
        MAX_WAIT,
        ge=0,
        description="Longest predicted wait of a round, in TTFT targets, before it gets 429; a quarter for "
        "a session's first round. A round that has waited twice as long is given up. 0: no "
        "bounds.",
    )
    perf: str | None = Field(
        None,
        description="Performance model: a shipped profile's name, a profile file, or MODEL@GPU, as in "
        "qwen3-32b@h20 or /models/Qwen3-8B@h200. `ampd serve` derives it from the model folder "
        "and this machine's GPUs by default.",
    )
    session_ttl_s: float = Field(1800.0, gt=0, description="Seconds without a round after which a session is released.")
    session_first_ttl_s: float = Field(
        300.0, gt=0, description="The same until a session's second round, if it is less than --session-ttl-s."
    )
    lease_s: float = Field(
        5.0, gt=0, description="Seconds for which a worker counts as alive after its last heartbeat."
    )
    log_rounds: Literal["none", "end", "steps"] = Field(
        "end",
        description="Lines of a round at INFO: none, one of the coordinator at its end, or every step in "
        "every process. Errors are always logged.",
    )

    @property
    def slo(self) -> Slo:
        """The targets of rounds that bring none of their own."""
        return Slo(ttft_s=self.ttft, itl_s=self.itl)
