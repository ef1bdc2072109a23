"""The body of `ampd doctor`: makes the checks in order, and writes the report."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ampd.cli.doctor import gpus, kernel, model, shared_state, software
from ampd.cli.doctor.engines import as_modelled, judge_trial
from ampd.cli.doctor.finding import Check, Finding, Verdict, made, worst
from ampd.cli.doctor.report import Report
from ampd.cli.doctor.settings import DoctorSettings
from ampd.cli.doctor.transport import judge_transport, read_transport
from ampd.cli.serve.default_perf import default_perf
from ampd.cli.serve.settings import TINY, EngineName
from ampd.documents import check_writable, write_document
from ampd.errors import UserError
from ampd.perf.model import PerformanceModel
from ampd.perf.presets import load_performance_model
from ampd.settings import parse_settings

PROG = "ampd doctor"
_STDOUT = Path("-")
_MIB = 1 << 20


def run(argv: Sequence[str]) -> int:
    """Make all checks; 0 if nothing is wrong, else 1.

    Raises:
        UserError: a wrong flag, a performance model that cannot be read, or a file that cannot be written.
    """
    settings = parse_settings(DoctorSettings, argv, PROG)
    prints = settings.out == _STDOUT
    if prints and settings.as_json:
        raise UserError(f"{PROG}: --json and --out - both print on stdout; choose one")
    file = None if prints else settings.out
    check_writable(file, replaces=True)
    if settings.perf:
        load_performance_model(settings.perf)
    examination = Examination(settings)
    examination.make()
    report = Report(examination.findings, examination.readings)
    trial = examination.readings.get("two engines")
    attachment = report.attachment(trial.logs if trial else {})
    if prints:
        print(attachment, end="")
    else:
        print(report.to_json() if settings.as_json else report.table(shutil.get_terminal_size((120, 24)).columns))
    if file:
        write_document(attachment, file, "report")
        print(f"{PROG}: for a bug report: {file}", file=sys.stderr)
    return 1 if worst(examination.findings) is Verdict.WRONG else 0


class Examination:
    """All checks, one after the other. What a check reads is there for the checks after it."""

    def __init__(self, settings: DoctorSettings) -> None:
        self._settings = settings
        self._computes = settings.engine is EngineName.SGLANG
        self.findings: list[Finding] = []
        self.readings: dict[str, Any] = {}

    def make(self) -> None:
        """Make every check, or name the reason why it is skipped."""
        settings, computes = self._settings, self._computes
        self._make(Check("load", kernel.read_load, kernel.judge_load))
        self._make(Check("Python", software.read_python, software.judge_python))
        judge_packages = partial(software.judge_packages, needs_engines=computes)
        self._make(Check("packages", software.read_packages, judge_packages))
        if computes:
            read_gpus = partial(gpus.read_gpus, asks_torch=find_spec("torch") is not None)
            self._make(Check("GPUs", read_gpus, partial(gpus.judge_gpus, tp=settings.tp)))
        else:
            self._skip("GPUs", "the modelled engine computes nothing")
        judge_compiler = partial(software.judge_compiler, has_gpu=bool(self._gpus))
        self._make(Check("compiler", software.read_compiler, judge_compiler))
        gpu_bytes = sum(gpu.memory_mib for gpu in self._gpus) * _MIB
        self._make(Check("memory", kernel.read_memory, partial(kernel.judge_memory, gpu_bytes=gpu_bytes)))
        self._make(Check("huge pages", kernel.read_huge_pages, kernel.judge_huge_pages))
        self._transport()
        self._make(Check("limits", kernel.read_limits, partial(kernel.judge_limits, locks_bytes=self._locked_bytes())))
        read_state = partial(shared_state.read_state, settings.state_url, settings.namespace)
        self._make(Check("Redis", read_state, shared_state.judge_state))
        read_model = partial(model.read_model, settings.model, settings.tp, needs_weights=computes)
        self._make(Check("model", read_model, self._judge_model))
        self._trial()

    def _make(self, check: Check[Any]) -> None:
        print(f"{PROG}: {check.name}", file=sys.stderr, flush=True)
        self.readings[check.name], findings = made(check)
        self.findings += findings

    def _skip(self, name: str, reason: str) -> None:
        self.findings.append(Finding(name, Verdict.SKIPPED, reason))

    @property
    def _gpus(self) -> tuple[gpus.GpuReading, ...]:
        reading = self.readings.get("GPUs")
        return reading.gpus if reading and self._computes else ()

    def _locked_bytes(self) -> int:
        """A worker pins its store for its GPU, and registers it with the network card."""
        memory, transport = self.readings.get("memory"), self.readings.get("NIXL")
        return memory.store if memory and (self._gpus or (transport and transport.cards)) else 0

    def _transport(self) -> None:
        if not self._computes:
            self._skip("NIXL", "the modelled engine moves no KV")
        elif find_spec("nixl") is None:
            self._skip("NIXL", "it is not installed")
        else:
            self._make(Check("NIXL", read_transport, judge_transport))

    def _judge_model(self, reading: model.ModelReading) -> list[Finding]:
        if not self._computes and not reading.problem:
            return [Finding("model", Verdict.OK, f"{reading.folder}: {reading.architecture}; nothing is computed")]
        memory = self.readings.get("memory")
        on_gpu = bool(self._gpus)
        rank_bytes = self._gpus[0].memory_mib * _MIB if on_gpu else memory.available if memory else 0
        is_shared = len(self._gpus) < 2 * self._settings.tp
        return model.judge_model(reading, self._settings.tp, rank_bytes, is_shared=is_shared)

    def _trial(self) -> None:
        name = "two engines"
        wrong = {finding.check for finding in self.findings if finding.verdict is Verdict.WRONG}
        if not self._settings.engines:
            return self._skip(name, "--no-engines")
        if causes := sorted(wrong & {"packages", "GPUs", "memory", "inotify", "model"}):
            return self._skip(name, f"they cannot run before this is fixed: {', '.join(causes)}")
        try:
            perf = self._settings.perf or default_perf(self._settings.model)
        except UserError as error:
            found, _, fix = str(error).rpartition("; ")
            self.findings.append(Finding("performance model", Verdict.WRONG, found, fix))
            return self._skip(name, "they need a performance model")
        from ampd.cli.doctor.trial import TrialReading, read_trial

        transport = self.readings.get("NIXL")
        raw = transport.here.gb_per_s if transport and not transport.here.problem else None

        def judge(reading: TrialReading) -> list[Finding]:
            predicts, its_name = self._model(perf)
            findings = judge_trial(reading, raw, predicts, its_name, self._settings.tp)
            return findings if self._computes else [as_modelled(finding) for finding in findings]

        return self._make(Check(name, partial(read_trial, self._settings, perf), judge))

    def _model(self, perf: str) -> tuple[PerformanceModel | None, str]:
        """The performance model to compare with and its name, or None and the reason why there is none."""
        if self._settings.model == TINY and self._gpus and not self._settings.perf:
            return None, "not compared, because the tiny model leaves a GPU idle; name a profile with --perf"
        model = load_performance_model(perf)
        return model, f"the performance model {model.name}"
