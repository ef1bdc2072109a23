"""The launcher's command lines are accepted by the components that they start."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampd.cli.serve.graph import GraphSite, graph_processes
from ampd.cli.serve.processes import ProcessSpec
from ampd.cli.serve.settings import ServeSettings
from ampd.settings import parse_settings
from router.settings import CoordinatorSettings
from workers.engines import settings_model
from workers.settings import WorkerSettings

SITE = GraphSite(
    model_path=Path("/models/some model"),
    model_names=("name",),
    state_url="unix:///run/redis.sock",
    port=8123,
    discovery_dir=Path("/run/discovery"),
    body_limit_mb=4,
    worker_env=tuple({"OMP_NUM_THREADS": str(index)} for index in range(8)),
)


def _specs(*flags: str) -> list[ProcessSpec]:
    return graph_processes(parse_settings(ServeSettings, flags, "ampd serve"), SITE)


def _flags(spec: ProcessSpec) -> list[str]:
    return list(spec.argv[3:])


def test_as_many_processes_as_asked_for() -> None:
    specs = _specs("--prefill", "3", "--decode", "2", "--coordinators", "2", "--engine", "modelled")
    assert Counter(spec.name.split("-")[0] for spec in specs) == {
        "prefill": 3,
        "decode": 2,
        "coordinator": 2,
        "frontend": 1,
    }
    assert len({spec.name for spec in specs}) == 8


@pytest.mark.parametrize(("argv", "module"), [((), "router.status_relay"), (("--no-status-relay",), "dynamo.frontend")])
def test_the_frontend_has_a_relay_before_it_unless_it_is_switched_off(argv: tuple[str, ...], module: str) -> None:
    frontend = _specs(*argv)[-1]
    assert frontend.argv[2] == module
    assert _flags(frontend) == _flags(_specs()[-1])


def test_the_relay_gets_further_names_of_sessions() -> None:
    flags = _flags(_specs("--session-names", "x-my-run")[-1])
    assert flags[flags.index("--session-names") + 1] == "x-my-run"
    assert "--session-names" not in _flags(_specs()[-1])


@pytest.mark.parametrize("coordinators", ["1", "2"])
def test_a_frontend_tries_again_and_never_avoids_a_coordinator(coordinators: str) -> None:
    frontend = _specs("--coordinators", coordinators, "--engine", "modelled")[-1]
    flags = _flags(frontend)
    assert flags[flags.index("--migration-limit") + 1] == "3"
    assert frontend.env["DYN_RUNTIME_INHIBITED_DURATION_SECS"] == "0"


@pytest.mark.parametrize(
    ("flags", "roles"),
    [
        ([], ["prefill", "decode"]),
        (["--prefill", "0", "--decode", "2"], ["decode", "decode"]),
        (["--workers", "5"], ["prefill", "prefill", "decode", "decode", "decode"]),
        (["--workers", "1"], ["decode"]),
        (["--mixed", "2"], ["mixed", "mixed"]),
        (["--mixed", "1", "--prefill", "1"], ["prefill", "mixed"]),
        (["--mixed", "1", "--decode", "1"], ["decode", "mixed"]),
    ],
)
def test_workers_start_in_the_roles_that_are_named_or_half_of_them_prefill(
    flags: list[str], roles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = _specs("--engine", "modelled", *flags)[:-2]
    assert [spec.name for spec in specs] == [f"{role}-{index}" for index, role in enumerate(roles)]
    monkeypatch.setenv("AMPD_STATE_URL", specs[0].env["AMPD_STATE_URL"])
    assert [parse_settings(WorkerSettings, _flags(spec), "python -m workers").role for spec in specs] == roles


def test_workers_accept_their_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--ttft", "0.7", "--ordering", "fcfs", "--slicing", "sliced", "--namespace", "green"]
    spec = _specs("--engine", "modelled", *flags)[0]
    monkeypatch.setenv("AMPD_STATE_URL", spec.env["AMPD_STATE_URL"])
    settings = parse_settings(WorkerSettings, _flags(spec), "python -m workers")
    assert (settings.slo.ttft_s, settings.ordering, settings.namespace) == (0.7, "fcfs", "green")
    assert settings.slicing == "sliced"
    assert settings.state_url == SITE.state_url
    assert str(settings.role) == "prefill"


def test_workers_get_the_scripted_replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = _specs("--engine", "modelled", "--replies", "replies.jsonl")[0]
    monkeypatch.setenv("AMPD_STATE_URL", spec.env["AMPD_STATE_URL"])
    settings: Any = parse_settings(settings_model("modelled"), _flags(spec), "python -m workers")
    assert settings.replies == tmp_path / "replies.jsonl"


@pytest.mark.parametrize(
    ("flags", "degrees"),
    [
        (["--tp", "4"], ["4", "4"]),
        (["--prefill-tp", "2", "--decode-tp", "1"], ["2", "1"]),
        (["--tp", "4", "--decode-tp", "8"], ["4", "8"]),
        (["--mixed", "2", "--tp", "4", "--mixed-tp", "2"], ["2", "2"]),
        (["--mixed", "1", "--prefill", "1", "--mixed-tp", "2"], ["1", "2"]),
    ],
)
def test_each_role_has_its_degree(flags: list[str], degrees: list[str]) -> None:
    argvs = [_flags(spec) for spec in _specs("--engine", "modelled", *flags)[:2]]
    assert [argv[argv.index("--tp") + 1] for argv in argvs] == degrees


def test_coordinators_accept_their_command_line() -> None:
    flags = ["--routing", "always-local", "--itl", "0.03", "--pools", "moved", "--dyn-tool-call-parser", "hermes"]
    settings = parse_settings(CoordinatorSettings, _flags(_specs(*flags)[-2]), "python -m router")
    assert (settings.routing, settings.slo.itl_s, settings.pools) == ("always-local", 0.03, "moved")


def test_further_names_go_to_the_coordinator_and_patterns_to_the_relay() -> None:
    site = replace(SITE, model_names=("name", "other", "claude-*"))
    *_, coordinator, frontend = graph_processes(parse_settings(ServeSettings, (), "ampd serve"), site)
    settings = parse_settings(CoordinatorSettings, _flags(coordinator), "python -m router")
    assert (settings.model_name, settings.served_name) == (["name", "other"], "name")
    assert _flags(frontend)[-1] == "--model-alias=claude-*=name"


def test_workers_get_their_policies() -> None:
    for spec in _specs("--ordering", "fcfs", "--slicing", "whole")[:2]:
        argv = _flags(spec)
        assert [argv[argv.index(flag) + 1] for flag in ("--ordering", "--slicing")] == ["fcfs", "whole"]


def test_the_password_of_the_state_is_on_no_command_line() -> None:
    site = replace(SITE, state_url="redis://ampd:S3cr3t@127.0.0.1:6379/0")
    settings = parse_settings(ServeSettings, ["--state-url", site.state_url], "ampd serve")
    specs = graph_processes(settings, site)
    assert not [word for spec in specs for word in spec.argv if "S3cr3t" in word]
    assert [spec.env.get("AMPD_STATE_URL") for spec in specs] == [site.state_url] * 3 + [None]


def test_the_frontend_inherits_none_of_our_settings_because_they_hold_passwords() -> None:
    inherited = {"AMPD_STATE_URL": "redis://:password@host", "AMPD_GRAPH_SECRET_FILE": "file", "DYN_LOG": "warn"}
    environments = {spec.name: spec.environment(inherited) for spec in _specs()}
    assert not [name for name in environments["frontend"] if name.startswith("AMPD_")]
    assert environments["frontend"]["DYN_LOG"] == "warn"
    assert environments["coordinator-0"]["AMPD_GRAPH_SECRET_FILE"] == "file"


def test_further_flags_reach_the_workers() -> None:
    assert _flags(_specs("--worker-args", "--ordering 'a b'")[0])[-2:] == ["--ordering", "a b"]


def test_device_environment_reaches_each_worker() -> None:
    workers = _specs("--prefill", "1", "--decode", "1")[:2]
    assert [spec.env["OMP_NUM_THREADS"] for spec in workers] == ["0", "1"]
    assert {spec.env["DYN_DISCOVERY_BACKEND"] for spec in workers} == {"file"}


def test_what_processes_send_each_other_stays_on_loopback_whatever_the_address_of_the_frontend() -> None:
    for spec in _specs("--host", "0.0.0.0"):
        assert spec.env["DYN_TCP_RPC_HOST"] == "127.0.0.1"
        assert spec.env["DYN_TCP_RESPONSE_STREAM_HOST"] == spec.env["UCX_NET_DEVICES"] == "lo"


def test_the_frontend_takes_bodies_of_bounded_size_and_no_administration() -> None:
    *others, frontend = _specs()
    assert frontend.env["DYN_HTTP_BODY_LIMIT_MB"] == "4"
    assert frontend.env["DYN_DISABLE_FRONTEND_ADMIN_API"] == "1"
    assert not [spec.name for spec in others if "DYN_HTTP_BODY_LIMIT_MB" in spec.env]


def test_every_process_but_the_frontend_has_a_system_port_of_its_own() -> None:
    settings = parse_settings(ServeSettings, ["--prefill", "2", "--coordinators", "2"], "ampd serve")
    ports = (20001, 20002, 20003, 20004, 20005)
    specs = graph_processes(settings, replace(SITE, system_ports=ports))
    assert [spec.env["DYN_SYSTEM_PORT"] for spec in specs] == [*map(str, ports), "-1"]
    assert {spec.env["DYN_SYSTEM_HOST"] for spec in specs[:-1]} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("argv", "host"),
    [(("--host", "0.0.0.0"), "127.0.0.1"), (("--host", "0.0.0.0", "--metrics-host", "10.0.0.7"), "10.0.0.7")],
)
def test_system_ports_which_end_sessions_are_not_opened_with_the_frontend(argv: tuple[str, ...], host: str) -> None:
    settings = parse_settings(ServeSettings, list(argv), "ampd serve")
    specs = graph_processes(settings, replace(SITE, system_ports=(20001, 20002, 20003)))
    assert {spec.env["DYN_SYSTEM_HOST"] for spec in specs[:-1]} == {host}


def test_without_metrics_no_process_opens_a_system_port() -> None:
    assert {spec.env["DYN_SYSTEM_PORT"] for spec in _specs("--no-metrics")} == {"-1"}
