"""Writes the reference of all settings from their models.

python -m docs.reference.configuration > docs/configuration.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any, get_args

from pydantic import AliasChoices
from pydantic.fields import FieldInfo
from pydantic_settings import CliPositionalArg

from ampd.settings import DYNAMO_PREFIX, PREFIX, Settings, is_secret
from docs.reference.environment_variables import ENVIRONMENT

_HEAD = """\
# Configuration

<!-- Written by: python -m docs.reference.configuration > docs/configuration.md -->

Every setting is a flag and an environment variable: `--max-wait` is `AMPD_MAX_WAIT`. The tables name other variables. A
flag wins over the variable, and the variable over the default. `--config FILE` reads settings from a TOML or YAML file,
named as the flags are. Flags win over the file, and the file over variables. An unknown flag or a wrong value ends the
command with one line and exit code 2. `ampd` names variables `AMPD_*` that nothing reads. Switches (`on`, `off`) are
`--name` and `--no-name`, or `1` and `0` as a variable. Arguments in capitals are positional and have no variable.
Secrets, and URLs with a password, belong into their variable. Several names of a setting mean the same.

[policies.md](policies.md) lists the parameters of policies. Variables that are not flags are [at the
end](#other-environment-variables).
"""

_ENVIRONMENT_HEAD = """\
## Other environment variables

Variables without a flag: our own, and those of other software that `ampd serve`, the manifests in `k8s/` or our
processes read or set. A text that begins with a value says what both `ampd serve` and the manifests set.

| variable | owner | |
| --- | --- | --- |
"""

_TABLE_HEAD = ("| flag, variable | type (default) | |", "| --- | --- | --- |")
_POSITIONAL = get_args(CliPositionalArg[str])[1]


@dataclass(frozen=True, slots=True)
class Section:
    """A command, a process, or settings that several of them share.

    Attributes:
        model: its settings as `module:class`, so that only this section's module is imported.
        base: settings that are described in another section and are not repeated here.
        text: a note beside the model's docstring.
    """

    title: str
    model: str
    base: str | None = None
    text: str = ""


GRAPH, CASE, WORKER = (
    "ampd.settings:GraphSettings",
    "planner.case_settings:CaseSettings",
    "workers.settings:WorkerSettings",
)

SECTIONS: tuple[Section, ...] = (
    Section(
        "Every process of a graph",
        GRAPH,
        text="`ampd serve`, which passes them on, `python -m router` and `python -m workers` take these.",
    ),
    Section("ampd serve", "ampd.cli.serve.settings:ServeSettings", GRAPH),
    Section("python -m router", "router.settings:CoordinatorSettings", GRAPH),
    Section("python -m workers", WORKER, GRAPH),
    Section(
        "python -m workers --engine sglang",
        "workers.engines.sglang_settings:SglangSettings",
        WORKER,
        "Also the flags of every worker.",
    ),
    Section(
        "python -m workers --engine modelled",
        "workers.engines.modelled:ModelledSettings",
        WORKER,
        "Also the flags of every worker.",
    ),
    Section("ampd replay", "workloads.replay_command:ReplaySettings"),
    Section("ampd compare", "ampd.cli.compare:CompareSettings"),
    Section("ampd top", "ampd.cli.top:TopSettings"),
    Section("ampd session", "ampd.cli.session:SessionSettings", text="`list`, `show` and `end` take these."),
    Section("ampd session list", "ampd.cli.session:ListSettings", "ampd.cli.session:SessionSettings"),
    Section("ampd session show ID", "ampd.cli.session:ShowSettings", "ampd.cli.session:SessionSettings"),
    Section("ampd session end ID", "ampd.cli.session:EndSettings", "ampd.cli.session:ShowSettings"),
    Section("ampd doctor", "ampd.cli.doctor:DoctorSettings"),
    Section("ampd completion", "ampd.cli.completion:CompletionSettings"),
    Section("ampd profile", "ampd.cli.profile:ProfileSettings"),
    Section(
        "The case of a plan or a simulation",
        CASE,
        text="`ampd plan` and `ampd simulate` take these.",
    ),
    Section("ampd plan", "planner.case_settings:PlanSettings", CASE),
    Section("ampd simulate", "planner.simulate_command:SimulateSettings", CASE),
    Section("ampd trace convert", "workloads.trace_command:ConvertSettings"),
    Section("ampd trace generate", "workloads.trace_command:GenerateSettings"),
    Section("ampd trace stats", "workloads.trace_command:StatsSettings"),
    Section("python -m ampd.tiny_model", "ampd.tiny_model:TinyModelSettings"),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row.

    Attributes:
        flags: as on the command line. An argument without a name is shown as its field in capitals.
        variables: as in the environment.
        schema: type, range and choices, as JSON schema.
    """

    field: str
    flags: tuple[str, ...]
    variables: tuple[str, ...]
    schema: Mapping[str, Any]
    default: str
    description: str
    is_required: bool

    @property
    def is_positional(self) -> bool:
        """Whether it is an argument without a name."""
        return bool(self.flags) and not self.flags[0].startswith("-")


def settings_of(model: type[Settings]) -> dict[str, Setting]:
    """All settings of a model, by field."""
    schema = model.model_json_schema(by_alias=False)
    definitions = schema.get("$defs", {})
    return {
        name: _setting(name, info, _resolved(schema["properties"][name], definitions))
        for name, info in model.model_fields.items()
    }


def rows_of(section: Section) -> list[Setting]:
    """The rows of a section's table: the settings that its base lacks or declares differently."""
    known = settings_of(load(section.base)) if section.base else {}
    return [setting for name, setting in settings_of(load(section.model)).items() if known.get(name) != setting]


def load(name: str) -> type[Settings]:
    """The model that `module:class` names."""
    module, _, attribute = name.partition(":")
    model: type[Settings] = getattr(import_module(module), attribute)
    return model


def render() -> str:
    """The reference as Markdown."""
    variables = [f"| {_names(entry.names)} | [{entry.owner}]({entry.source}) | {entry.text} |" for entry in ENVIRONMENT]
    return "\n".join(
        [_HEAD, *(_rendered(section) for section in SECTIONS), _ENVIRONMENT_HEAD + "\n".join(variables), ""]
    )


# -- one section


def _rendered(section: Section) -> str:
    model = load(section.model)
    lines = [f"## {section.title}", "", " ".join((model.__doc__ or "").split())]
    if section.text:
        lines += ["", section.text]
    base = next((other for other in SECTIONS if other.model == section.base), None)
    if base and not section.text:
        lines += ["", f"Also the flags of [{base.title}](#{_anchor(base.title)}). The rows here win."]
    lines += ["", *_TABLE_HEAD, *(_row(setting) for setting in rows_of(section)), ""]
    return "\n".join(lines)


def _row(setting: Setting) -> str:
    default = "required" if setting.is_required else setting.default
    flags = tuple(flag for flag in setting.flags if not flag.startswith("--no-"))
    usual = {PREFIX + flag.removeprefix("--").replace("-", "_").upper() for flag in flags}
    cells = (
        _names(flags + tuple(name for name in setting.variables if name not in usual)),
        f"{_type(setting.schema)} ({default})" if default else _type(setting.schema),
        setting.description,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _anchor(title: str) -> str:
    return "".join(char for char in title.lower().replace(" ", "-") if char.isalnum() or char in "-_")


# -- one setting


def _setting(name: str, info: FieldInfo, schema: Mapping[str, Any]) -> Setting:
    if _POSITIONAL in info.metadata:
        flags: tuple[str, ...] = (name.upper(),)
        variables: tuple[str, ...] = ()
    else:
        names = list(_aliases(name, info))
        flags = () if is_secret(info) else tuple(_flags(names, is_switch=schema.get("type") == "boolean"))
        variables = tuple(alias.upper() if _is_dynamos(alias) else PREFIX + alias.upper() for alias in names)
    return Setting(
        field=name,
        flags=flags,
        variables=variables,
        schema=schema,
        default="" if info.is_required() else _shown(info.default),
        description=info.description or "",
        is_required=info.is_required(),
    )


def _aliases(name: str, info: FieldInfo) -> Iterator[str]:
    """The names of a setting: its own or an alias of ours that replaces it, and its name in Dynamo."""
    alias = info.validation_alias
    aliases = alias.choices if isinstance(alias, AliasChoices) else [alias] if alias else []
    ours = [str(choice) for choice in aliases if not _is_dynamos(str(choice))]
    dynamos = [str(choice) for choice in aliases if _is_dynamos(str(choice))]
    yield from ours or ([] if name in dynamos else [name])
    yield from dynamos


def _flags(names: list[str], *, is_switch: bool) -> Iterator[str]:
    for name in names:
        kebab = name.replace("_", "-")
        yield f"--{kebab}"
        if is_switch:
            yield f"--no-{kebab}"


def _is_dynamos(name: str) -> bool:
    return name.upper().startswith(DYNAMO_PREFIX)


def _resolved(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a value, with references resolved and without the option `null`."""
    if "anyOf" in schema:
        (schema,) = (option for option in schema["anyOf"] if option.get("type") != "null")
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    return {name: value for name, value in schema.items() if name not in ("description", "title", "default")}


def _shown(default: Any) -> str:
    if default is None or default == "":
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{default.value if isinstance(default, Enum) else default}`"


_TYPES = {"integer": "integer", "number": "number", "boolean": "switch", "string": "text", "array": "words"}


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    words = "path" if schema.get("format") == "path" else _TYPES[schema["type"]]
    if "pattern" in schema:
        return f"{words} like `{schema['pattern']}`"
    limits = [
        f"{sign} {schema[key]:g}"
        for key, sign in (("exclusiveMinimum", ">"), ("minimum", "≥"), ("exclusiveMaximum", "<"), ("maximum", "≤"))
        if key in schema
    ]
    return " ".join([words, ", ".join(limits)]) if limits else words


if __name__ == "__main__":
    print(render(), end="")
