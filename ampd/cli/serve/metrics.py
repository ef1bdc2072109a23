"""Metrics of a local graph: a port per process, and a file that lists the ports for Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from ampd.cli.serve.processes import ProcessSpec
from ampd.telemetry.metrics.system import HOST_VARIABLE, LIVENESS_PATH, OFF, PORT_VARIABLE

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Loopback address for a server that listens on all addresses."""
TARGETS_FILE = "metrics.json"


def system_environment(host: str, port: int | None) -> dict[str, str]:
    """Environment that opens the system port of a process; None: no port, even if our own environment has one."""
    if port is None:
        return {PORT_VARIABLE: str(OFF)}
    return {PORT_VARIABLE: str(port), HOST_VARIABLE: host}


def system_url(host: str, port: int) -> str:
    """The address of a system port for callers on this machine."""
    return f"http://{_address(host)}:{port}"


def live_urls(host: str, specs: Iterable[ProcessSpec], elsewhere: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Name -> address at which a process says that it lives. Processes without a port are left out.

    Coordinators and workers answer there by their event loop, frontends by Dynamo's threads, which do all their work.

    Args:
        host, elsewhere: see `write_targets`.
    """
    urls = {}
    for spec in specs:
        if spec.name in elsewhere:
            urls[spec.name] = f"{system_url(*elsewhere[spec.name])}/live"
        elif (port := int(spec.env.get(PORT_VARIABLE, OFF))) != OFF:
            urls[spec.name] = system_url(host, port) + LIVENESS_PATH
    return urls


def _address(host: str) -> str:
    host = _ANY.get(host, host)
    return f"[{host}]" if ":" in host else host


def write_targets(
    folder: Path, host: str, specs: Iterable[ProcessSpec], elsewhere: Mapping[str, tuple[str, int]]
) -> Path:
    """Write the file for Prometheus's `file_sd_configs`: one target per process, with its name in the label `process`.

    Args:
        host: that the system ports listen on.
        elsewhere: name -> (host, port) of the processes whose metrics are not at the system port.
    """
    places = {spec.name: elsewhere.get(spec.name) or (host, spec.env[PORT_VARIABLE]) for spec in specs}
    targets = [
        {"targets": [f"{_address(where)}:{port}"], "labels": {"process": name}}
        for name, (where, port) in places.items()
    ]
    path = folder / TARGETS_FILE
    path.write_text(json.dumps(targets, indent=1) + "\n", encoding="utf-8")
    return path
