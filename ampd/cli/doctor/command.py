"""The body of `ampd doctor`: makes the checks in order, and prints the report."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

from pydantic import Field

from ampd.cli.doctor import machine
from ampd.cli.doctor.finding import Finding, Verdict, made, table, to_json, worst
from ampd.cli.doctor.model import check_performance_model, judge_model, read_model
from ampd.cli.doctor.shared_state import judge_state, read_state
from ampd.cli.serve.devices import FoundGpu, found_gpus
from ampd.cli.serve.settings import EMBEDDED, TINY, EngineName
from ampd.graph_settings import GraphSettings
from ampd.perf.presets import load_performance_model, profile_names
from ampd.settings import Settings, parse_settings
from workers.kv.store_memory import available_bytes


class DoctorSettings(Settings):
    """Report whether this machine can run a graph: ok, warning or wrong, with a fix for each check."""

    known_names: ClassVar = {"perf": profile_names}

    engine: EngineName = Field(EngineName.SGLANG, description="Engine of the workers.")
    model: str = Field(TINY, description="Model folder (Hugging Face layout), or `tiny`.")
    tp: int = Field(1, ge=1, description="GPUs per worker (tensor parallelism).")
    perf: str | None = Field(None, description="Performance model of the graph; default: as `ampd serve` takes it.")
    namespace: str = Field(
        GraphSettings.model_fields["namespace"].default,
        validation_alias="dyn_namespace",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        description="Dynamo namespace of the graph, with which the key begins that tries the shared state.",
    )
    state_url: str = Field(
        EMBEDDED,
        description="Shared state to check; `embedded` checks the Redis that `ampd serve` would start.",
    )
    as_json: bool = Field(False, validation_alias="json", description="Print one JSON object on stdout.")


def run(argv: Sequence[str]) -> int:
    """Make all checks; 0 if nothing is wrong, else 1.

    Raises:
        UserError: a wrong flag, or a performance model that cannot be read.
    """
    settings = parse_settings(DoctorSettings, argv, "ampd doctor")
    if settings.perf:
        load_performance_model(settings.perf)
    findings = list(_examined(settings))
    print(to_json(findings) if settings.as_json else table(findings, shutil.get_terminal_size((120, 24)).columns))
    return 1 if worst(findings) is Verdict.WRONG else 0


def _examined(settings: DoctorSettings) -> Iterator[Finding]:
    """The finding of every check. Only engines that compute need a device, its compiler, shared memory and weights."""
    computes = settings.engine is EngineName.SGLANG
    yield made("software", partial(machine.check_software, settings.engine))
    gpus: list[FoundGpu] = []
    if computes:
        yield made("GPUs", lambda: _check_gpus(gpus, settings.tp))
        if gpus:
            yield made("compiler", machine.check_compiler)
        yield made("memory", machine.check_memory)
        yield made("/dev/shm", machine.check_shared_memory)
        yield made("locked memory", machine.check_locked_memory)
    yield made("inotify", machine.check_inotify)
    yield made("Redis", lambda: judge_state(read_state(settings.state_url, settings.namespace)))
    model = made("model", lambda: _check_model(settings, gpus, computes=computes))
    yield model
    if model.verdict is Verdict.WRONG:
        yield Finding("performance model", Verdict.SKIPPED, "the model cannot be served")
    else:
        yield made("performance model", partial(check_performance_model, settings.perf, settings.model, settings.tp))


def _check_gpus(gpus: list[FoundGpu], tp: int) -> Finding:
    """As `machine.check_gpus`; `gpus` gets those that are found, for the checks after it."""
    gpus += found_gpus()
    return machine.check_gpus(gpus, tp)


def _check_model(settings: DoctorSettings, gpus: Sequence[FoundGpu], *, computes: bool) -> Finding:
    reading = read_model(settings.model, settings.tp)
    if computes:
        return judge_model(reading, settings.tp, gpus, available_bytes())
    return Finding("model", Verdict.OK, f"{reading.folder}: {reading.architecture}; nothing is computed")
