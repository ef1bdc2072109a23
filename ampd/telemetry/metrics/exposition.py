"""Exposes plain numbers as Prometheus metrics: one collector per process, on Dynamo's system port."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any

from ampd.child_process import HIGHEST_PORT
from ampd.errors import UserError
from ampd.telemetry.metrics.names import METRICS, OTHER, PREFIX, Kind, Metric, Process

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

# -- Counters and histograms as plain numbers: cheap enough to update within a round's own task.
#
# `prometheus_client` only formats them. Its own counters take their storage from
# the environment at import, which SGLang changes when it starts, and a lock at each use.

_WORD = re.compile(r"[a-z]+(?:-[a-z]+)*")
_MOST_WORDS = 64
_LONGEST_WORD = 64


class LabelValues:
    """Bounds the values of one label: plain words with hyphens, up to `most`. All other texts become `other`."""

    def __init__(self, most: int = _MOST_WORDS) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, text: str) -> str:
        if text in self._known:
            return text
        if len(self._known) >= self._most or len(text) > _LONGEST_WORD or not _WORD.fullmatch(text):
            return OTHER
        self._known.add(text)
        return text


class Counter:
    """A counter with its labels in the metric's order. Combinations that are known beforehand start at zero."""

    def __init__(self, metric: Metric) -> None:
        assert metric.kind is Kind.COUNTER
        self.metric = metric
        self._values: dict[tuple[str, ...], float] = dict.fromkeys(product(*metric.labels.values()), 0.0)

    def add(self, amount: float, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def read(self) -> list[tuple[tuple[str, ...], float]]:
        """All values by labels."""
        return list(self._values.items())


class Histogram:
    """A histogram with its labels in the metric's order. Combinations that are known beforehand start empty."""

    def __init__(self, metric: Metric) -> None:
        assert metric.kind is Kind.HISTOGRAM
        self.metric = metric
        self._bounds = metric.buckets
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        for labels in product(*metric.labels.values()):
            self._start(labels)

    def observe(self, value: float, *labels: str, count: int = 1) -> None:
        """Enter `count` observations of `value`."""
        counts = self._counts.get(labels) or self._start(labels)
        counts[bisect_left(self._bounds, value)] += count
        self._sums[labels] += value * count

    def read(self) -> list[tuple[tuple[str, ...], list[int], float]]:
        """By labels: observations in each bucket (not cumulated; the last one has no upper bound), and their sum."""
        return [(labels, list(counts), self._sums[labels]) for labels, counts in list(self._counts.items())]

    def _start(self, labels: tuple[str, ...]) -> list[int]:
        self._sums[labels] = 0.0
        counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
        return counts


log = logging.getLogger(__name__)
_READ_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """A value of the process's state at the time of a scrape. `labels`: label values in the metric's order."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


Read = Callable[[], Iterable[Reading]]


class ProcessCollector:
    """All metrics of one process: the recorded ones, and gauges that are read at each scrape.

    Each scrape names each metric of the process, even if it has no value yet.

    Dynamo scrapes on a separate thread. The gauges read state that belongs to the event loop, so they are read on the
    loop. If the loop does not respond within a second, the scrape has the recorded metrics only.

    Args:
        loop: the event loop that `read` must run on; None: `read` runs on the thread of the scrape.
    """

    def __init__(
        self,
        process: Process,
        recorded: Sequence[Counter | Histogram],
        read: Read,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        names = {values.metric.name for values in recorded}
        self._gauges = [metric for metric in METRICS if process in metric.processes and metric.name not in names]
        self._recorded = recorded
        self._read = read
        self._loop = loop

    def collect(self) -> Iterator[Family]:
        """The metric families; `CollectorRegistry` calls this at each scrape."""
        for values in self._recorded:
            yield _counter(values) if isinstance(values, Counter) else _histogram(values)
        try:
            readings = _on_loop(self._loop, self._read)
        except Exception as error:
            log.warning("metrics that mirror state are left out of a scrape: %r", error)
            return
        yield from _read_families(self._gauges, readings)


def expose(
    collector: ProcessCollector, endpoint: Any, *, namespace: str, component: str, name: str, model_name: str
) -> None:
    """Add a collector to /metrics of Dynamo's system port, with Dynamo's labels.

    Args:
        endpoint: Dynamo's endpoint `namespace.component.name`, whose instance id becomes the label `worker_id`.
    """
    # Not before the engine runs: SGLang chooses how prometheus_client stores its values.
    from dynamo.common.utils.prometheus import register_engine_metrics_callback
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    register_engine_metrics_callback(
        endpoint,
        registry,
        metric_prefix_filters=[PREFIX],
        namespace_name=namespace,
        component_name=component,
        endpoint_name=name,
        model_name=model_name,
    )


def _on_loop(loop: asyncio.AbstractEventLoop | None, read: Read) -> list[Reading]:
    if loop is None or loop is _running_loop():
        return list(read())
    result: Future[list[Reading]] = Future()

    def run() -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(list(read()))
        except BaseException as error:
            result.set_exception(error)

    loop.call_soon_threadsafe(run)
    try:
        return result.result(_READ_TIMEOUT_S)
    finally:
        result.cancel()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _counter(counter: Counter) -> Family:
    from prometheus_client.core import CounterMetricFamily

    metric = counter.metric
    family = CounterMetricFamily(metric.family, metric.help, labels=list(metric.labels))
    for labels, value in counter.read():
        family.add_metric(list(labels), value)
    return family


def _histogram(histogram: Histogram) -> Family:
    from prometheus_client.core import HistogramMetricFamily
    from prometheus_client.utils import floatToGoString

    metric = histogram.metric
    family = HistogramMetricFamily(metric.name, metric.help, labels=list(metric.labels))
    bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
    for labels, counts, total in histogram.read():
        buckets: list[tuple[str, float]] = list(zip(bounds, accumulate(counts), strict=True))
        family.add_metric(list(labels), buckets, total)
    return family


def _read_families(metrics: Iterable[Metric], readings: Iterable[Reading]) -> Iterator[Family]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for metric in metrics:
        kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        families[metric.name] = kind(metric.family, metric.help, labels=list(metric.labels))
    for reading in readings:
        families[reading.metric.name].add_metric(list(reading.labels), reading.value)
    yield from families.values()


# -- Dynamo's system port of a coordinator or worker (`DYN_SYSTEM_PORT`): /metrics, /health and /live
#
# Dynamo gives the same answer at /health and /live. In our processes it means: this process has started and can work.
# The answer must not depend on other processes, because a failing liveness probe ends the process. For example, a
# coordinator without a decode worker is ready. It stays out of discovery until a decode worker appears (metric
# `ampd_live_workers`).
#
# Dynamo's own threads answer there, also when the event loop of our code is blocked for good. So liveness probes ask
# `LIVENESS_PATH`, which the event loop answers.

PORT_VARIABLE = "DYN_SYSTEM_PORT"
HOST_VARIABLE = "DYN_SYSTEM_HOST"
OFF = -1

_LIVENESS_ROUTE = "live"
LIVENESS_PATH = f"/engine/{_LIVENESS_ROUTE}"
"""The path of the system port that the event loop answers with 200, also before the process is ready."""

_BY_ENDPOINTS_VARIABLE = "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS"


def prepare(prog: str, environment: MutableMapping[str, str] | None = None) -> None:
    """Check the port, and keep Dynamo from deriving /health from its endpoints. Call it before Dynamo's runtime starts.

    A /health that follows the endpoints never turns bad again. It would also count a coordinator as dead that waits for
    its first decode worker, which may load for many minutes.

    Raises:
        UserError: Dynamo cannot open this port.
    """
    env = os.environ if environment is None else environment
    port = env.get(PORT_VARIABLE, str(OFF))
    try:
        fits = OFF <= int(port) <= HIGHEST_PORT
    except ValueError:
        fits = False
    if not fits:
        raise UserError(
            f"{prog}: {PORT_VARIABLE}={port}: not a port that Dynamo takes for metrics and health; use 1 to "
            f"{HIGHEST_PORT}, 0 (any free one) or {OFF} (none)"
        )
    env.pop(_BY_ENDPOINTS_VARIABLE, None)


def set_ready(runtime: Any, is_ready: bool) -> None:
    """Set the answer of /health and /live: this process can work, or it cannot (any more)."""
    runtime.set_health_status(is_ready)


def answer_liveness(runtime: Any) -> None:
    """Let the running event loop answer at `LIVENESS_PATH`."""
    runtime.register_engine_route(_LIVENESS_ROUTE, _alive)


async def _alive(_request: Mapping[str, Any]) -> dict[str, Any]:
    return {"status": "alive"}


def log_address(runtime: Any) -> None:
    """Log the address of the metrics, or that the port could not be opened."""
    port = os.environ.get(PORT_VARIABLE, str(OFF))
    if url := runtime.system_status_server_url():
        log.info("metrics at %s/metrics", url)
    elif int(port) >= 0:
        log.error("no metrics and no health checks: port %s is taken; set %s to a free one", port, PORT_VARIABLE)
