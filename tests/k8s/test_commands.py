"""Flags in the manifests exist, values are valid, variables are read by somebody; nothing is started here."""

import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ampd.errors import UserError
from ampd.policies import registry
from ampd.settings import Settings, parse_settings
from ampd.tiny_model import TinyModelSettings
from router.settings import CoordinatorSettings
from tests.k8s.pods import UNKNOWN_SECRET, Pod, command_line, environment, pods
from tests.k8s.rendering import GRAPHS, Document, for_each, needs_kubectl, rendered
from workers.engines import settings_model
from workers.settings import chosen_engine

pytestmark = needs_kubectl

OURS, DYNAMO, TRANSPORT = "AMPD_", "DYN_", ("UCX_", "NIXL_")
FRONTENDS = ("dynamo.frontend", "router.status_relay")
OF_THE_IMAGE = {"HOME", "HF_HUB_OFFLINE"}


def model_of(argv: list[str]) -> type[Settings]:
    """The settings that a command line of ours is parsed by."""
    python, dash_m, module, *flags = argv
    assert (python, dash_m) == ("python3", "-m")
    models: dict[str, type[Settings]] = {"router": CoordinatorSettings, "ampd.tiny_model": TinyModelSettings}
    return settings_model(chosen_engine(flags)) if module == "workers" else models[module]


def each_process(documents: Any) -> Iterator[tuple[Pod, Document, list[str], dict[str, str]]]:
    """Every container of the graph, with what it runs and the environment that it runs in."""
    for pod in pods(documents):
        for container in pod.containers() if pod.is_graph() else ():
            argv = command_line(pod, container, documents)
            yield pod, container, argv, environment(pod, container, documents)


def parsed(argv: list[str], variables: dict[str, str]) -> Any:
    """The settings of a process of ours that is started with these and no other variables. Raises `UserError`."""
    return _parsed(tuple(argv), tuple(variables.items()))


@cache
def _parsed(argv: tuple[str, ...], variables: tuple[tuple[str, str], ...]) -> Settings:
    with pytest.MonkeyPatch.context() as patch:
        clear_environment(patch)
        for name, value in variables:
            patch.setenv(name, value)
        return parse_settings(model_of(list(argv)), argv[3:], argv[2])


def clear_environment(patch: pytest.MonkeyPatch) -> None:
    """Leave out the variables of ours and Dynamo's that the environment of the tests happens to set."""
    for name in [name for name in os.environ if name.startswith((OURS, DYNAMO))]:
        patch.delenv(name)


@for_each(GRAPHS)
def test_our_own_processes_take_their_flags_and_environment(name: str) -> None:
    settings = {}
    for pod, container, argv, variables in each_process(rendered(name)):
        if argv[2] not in FRONTENDS:
            settings[pod.name, container["name"]] = parsed(argv, variables)
    assert {pod for pod, container in settings if container == "main"} == {"coordinator", "prefill", "decode"}
    shared = {
        (flags.namespace, flags.state_url, flags.perf, flags.ttft, flags.itl)
        for (_, container), flags in settings.items()
        if container == "main"
    }
    assert len(shared) == 1, "coordinator and workers disagree"
    assert settings["prefill", "main"].role == "prefill"
    assert settings["decode", "main"].role == "decode"
    assert len({settings[pod, "main"].model for pod in ("coordinator", "prefill", "decode")}) == 1
    coordinator = settings["coordinator", "main"]
    assert coordinator.kv_block_size == settings["decode", "main"].page_size == settings["prefill", "main"].page_size


@for_each(GRAPHS)
def test_the_policies_exist(name: str) -> None:
    for _, container, argv, variables in each_process(rendered(name)):
        if container["name"] != "main" or argv[2] in FRONTENDS:
            continue
        settings = parsed(argv, variables)
        for kind in ("routing", "binding", "pools", "ordering", "slicing"):
            if hasattr(settings, kind):
                assert registry.create_named(kind, getattr(settings, kind))


@for_each(GRAPHS)
def test_dynamo_has_the_parsers(name: str) -> None:
    from dynamo._core import get_reasoning_parser_names, get_tool_parser_names

    for pod, container, argv, variables in each_process(rendered(name)):
        if (pod.name, container["name"]) == ("coordinator", "main"):
            settings = parsed(argv, variables)
            assert settings.dyn_tool_call_parser in get_tool_parser_names()
            assert settings.dyn_reasoning_parser in [None, *get_reasoning_parser_names()]


@for_each(GRAPHS)
def test_the_url_of_the_shared_state_has_the_password(name: str) -> None:
    for _, container, argv, variables in each_process(rendered(name)):
        if container["name"] == "main" and argv[2] == "workers":
            url = parsed(argv, variables).state_url
            password = "only-for-trying-it-out" if "no-gpu" in name else UNKNOWN_SECRET
            if "external" in name:
                assert url == UNKNOWN_SECRET
            elif "tls" in name:
                assert url == f"rediss://ampd:{password}@ampd-redis:6379/0?ssl_ca_certs=/etc/ampd/redis-ca/ca.crt"
            else:
                assert url == f"redis://ampd:{password}@ampd-redis:6379/0"


@for_each(GRAPHS)
def test_dynamos_frontend_takes_its_flags(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dynamo.frontend.main import parse_args

    clear_environment(monkeypatch)
    for pod, _, argv, variables in each_process(rendered(name)):
        if pod.name != "frontend" or argv[2] not in FRONTENDS:
            continue
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setattr(sys, "argv", argv[2:])
        config, *_ = parse_args()
        assert (config.http_host, config.http_port, config.router_mode) == ("0.0.0.0", 8000, "round-robin")
        assert config.namespace == config.namespace_prefix == variables["DYN_NAMESPACE"]
        assert (config.discovery_backend, config.request_plane, config.event_plane) == ("kubernetes", "tcp", "zmq")


@for_each(GRAPHS)
def test_frontends_are_behind_the_status_relay_unless_it_is_left_out(name: str) -> None:
    modules = {argv[2] for pod, container, argv, _ in each_process(rendered(name)) if is_frontend(pod, container)}
    assert modules == {FRONTENDS[0] if "no-status-relay" in name else FRONTENDS[1]}


def is_frontend(pod: Pod, container: Document) -> bool:
    return (pod.name, container["name"]) == ("frontend", "main")


@for_each(GRAPHS)
def test_every_variable_is_read_by_somebody(name: str) -> None:
    documents = rendered(name)
    processes = [(pod, container, argv) for pod, container, argv, _ in each_process(documents)]
    everywhere = {field for _, _, argv in processes if argv[2] not in FRONTENDS for field in fields_of(argv)}
    for pod, container, argv in processes:
        own = fields_of(argv) if argv[2] not in FRONTENDS else set()
        entries = [(entry, own) for entry in container.get("env", [])]
        entries += [(entry, everywhere) for entry in pod.shared_env]
        referred = "".join(entry.get("value", "") for entry, _ in entries)
        for entry, fields in entries:
            variable = entry["name"]
            if variable.startswith(OURS):
                assert variable in fields or f"$({variable})" in referred, f"{pod.name}: nobody reads {variable}"
            elif variable.startswith(DYNAMO):
                assert is_dynamos(variable), f"{pod.name}: Dynamo does not know {variable}"
            else:
                assert variable in OF_THE_IMAGE, variable


@pytest.mark.slow
@for_each(GRAPHS)
def test_the_transport_reads_its_variables(name: str) -> None:
    (config,) = (each for each in rendered(name) if each["metadata"]["name"] == "ampd-kv-transport")
    for variable in config["data"]:
        assert variable.startswith(TRANSPORT)
        assert is_transports(variable), f"neither UCX nor NIXL knows {variable}"


def fields_of(argv: list[str]) -> set[str]:
    """The variables that set a field of a process' settings."""
    names = set()
    for field, info in model_of(argv).model_fields.items():
        alias = info.validation_alias
        names.add(alias.upper() if isinstance(alias, str) else f"{OURS}{field.upper()}")
    return names


@cache
def is_dynamos(variable: str) -> bool:
    """Whether any part of Dynamo's packages names the variable."""
    return any(variable.encode() in part for part in _dynamo_parts())


@cache
def _dynamo_parts() -> tuple[bytes, ...]:
    spec = find_spec("dynamo.frontend")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parents[1]
    files = [*package.glob("*.so"), *(package / "common").rglob("*.py")]
    files += [file for part in ("frontend", "runtime") for file in (package / part).glob("*.py")]
    return tuple(file.read_bytes() for file in files)


@cache
def is_transports(variable: str) -> bool:
    """Whether UCX or NIXL names the variable."""
    return variable.removeprefix("UCX_").encode() in transport_text()


@cache
def transport_text() -> bytes:
    """The libraries that come with NIXL's package."""
    spec = find_spec("nixl")
    if spec is None or spec.origin is None:
        pytest.skip("NIXL is not installed")
    packages = Path(spec.origin).parents[1]
    libraries = [*packages.glob("nixl*.libs/*.so*"), *packages.glob(".nixl*/**/*.so*")]
    assert libraries
    return b"".join(file.read_bytes() for file in libraries)


WRONG: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "an unknown flag": ("workers", ["--replicas=2"], {}),
    "a value out of range": ("workers", ["--tp=0"], {}),
    "an engine's flag for another engine": ("workers", ["--time-scale=0.1"], {}),
    "a wrong variable": ("router", [], {"AMPD_TTFT": "fast"}),
    "a drain that Dynamo cuts short": ("router", [], {"AMPD_DRAIN_S": "60"}),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_found(mistake: str) -> None:
    module, flags, extra = WRONG[mistake]
    (argv, variables), *_ = (
        (argv, variables) for _, _, argv, variables in each_process(rendered("base")) if argv[2] == module
    )
    assert parsed(argv, variables)
    with pytest.raises(UserError):
        parsed([*argv, *flags], {**variables, **extra})


def test_unknown_variables_are_found() -> None:
    assert not is_dynamos("DYN_SYSTEM_PROT")
    assert "AMPD_TTTF" not in fields_of(["python3", "-m", "router"])
