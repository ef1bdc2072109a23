"""The settings in which policies are compared: the AMPD paper's twelve (arXiv 2602.14516) and real sessions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import analytic_model
from ampd.types import Slo
from planner.simulator.options import Cluster, ReplicaGroup, parse_groups
from workloads.trace import Session, load_trace, retime
from workloads.trace_command import WORKLOADS, Lengths, generate

PAPER_GPUS = {"toolbench": 8, "gaia": 32, "hotpotqa": 8, "dureader": 16}
PAPER_SLOS_MS = {
    "qwen3-32b": {"toolbench": (350, 40), "gaia": (1000, 35), "hotpotqa": (450, 30), "dureader": (1200, 40)},
    "llama-3.1-70b": {"toolbench": (1000, 50), "gaia": (1500, 35), "hotpotqa": (2500, 45), "dureader": (5000, 50)},
    "mixtral-8x7b": {"toolbench": (130, 30), "gaia": (350, 20), "hotpotqa": (150, 25), "dureader": (300, 50)},
}
"""GPUs per trace, and TTFT and ITL targets in milliseconds per model and trace, of the paper."""


def cluster_of(model: PiecewiseModel, prefill: str, decode: str) -> Cluster:
    """Replicas, as in 1xTP4, with the KV memory that the model leaves them."""
    prefill_groups, decode_groups = (
        tuple(
            ReplicaGroup(count, theta, model.kv_capacity_tokens(theta) or 0)
            for count, theta in parse_groups(text, "layout")
        )
        for text in (prefill, decode)
    )
    return Cluster(decode=decode_groups, prefill=prefill_groups)


@dataclass(frozen=True)
class Setting:
    """A model on GPUs with a layout, a workload and targets.

    Attributes:
        trace: a workload of `workloads.trace_command`, or a trace's name or path.
        prefill, decode: replicas, as in 1xTP4.
        duration_s: of the arrivals; long enough for a backlog to show.
    """

    model: str
    gpu: str
    trace: str
    prefill: str
    decode: str
    ttft_s: float
    itl_s: float
    duration_s: float = 100.0

    @property
    def name(self) -> str:
        return f"{self.model} {self.trace} {self.prefill}+{self.decode}"

    @property
    def gpus(self) -> int:
        """GPUs of both phases."""
        return self.cluster().gpus

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft_s, self.itl_s)

    def performance_model(self) -> PiecewiseModel:
        return _model(self.model, self.gpu)

    def cluster(self) -> Cluster:
        return cluster_of(self.performance_model(), self.prefill, self.decode)

    def workload(self, count: int, seed: int) -> tuple[Session, ...]:
        """Sessions of different names, to plan and to fit with: `count` generated ones, or the trace once."""
        if self.trace in WORKLOADS:
            return tuple(generate(self.trace, count, 1.0, seed, Lengths.PER_SESSION))
        return _trace(self.trace)

    def sessions(self, rate: float, seed: int) -> list[Session]:
        """Poisson arrivals over `duration_s`, at least 100 sessions."""
        count = max(round(rate * self.duration_s), 100)
        if self.trace in WORKLOADS:
            return list(generate(self.trace, count, rate, seed, Lengths.PER_SESSION))
        return retime(_trace(self.trace), rate, seed, count)


def paper_settings() -> Iterator[Setting]:
    """3 models x 4 traces on H20, half of the GPUs for each phase in replicas of TP 4."""
    for model, targets in PAPER_SLOS_MS.items():
        for trace, (ttft_ms, itl_ms) in targets.items():
            half = f"{PAPER_GPUS[trace] // 8}xTP4"
            yield Setting(model, "h20", trace, half, half, ttft_ms / 1e3, itl_ms / 1e3)


def real_settings() -> Iterator[Setting]:
    """Real sessions: coding agents with their own pauses, tau-bench, ToolBench's answers."""
    for model, ttft_s, itl_s in (("qwen3-32b", 8.0, 0.05), ("llama-3.1-70b", 16.0, 0.06)):
        yield Setting(model, "h20", "coding-agents", "2xTP4", "2xTP4", ttft_s, itl_s, duration_s=600.0)
        yield Setting(model, "h20", "tau-bench-airline", "1xTP4", "1xTP4", ttft_s / 8, itl_s)
        yield Setting(model, "h20", "toolbench-answers", "1xTP4", "1xTP4", ttft_s / 8, itl_s)
    yield Setting("qwen3-32b", "h100", "coding-agents", "2xTP2", "2xTP2", 6.0, 0.04, duration_s=600.0)
    yield Setting("llama-3.1-8b", "h100", "tau-bench-airline", "1xTP1", "1xTP1", 0.3, 0.02)


@cache
def _model(name: str, gpu: str) -> PiecewiseModel:
    return analytic_model(name, gpu)


@cache
def _trace(name: str) -> tuple[Session, ...]:
    return tuple(load_trace(name))
