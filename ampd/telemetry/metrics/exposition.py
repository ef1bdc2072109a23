"""From plain numbers to Prometheus: a collector per process, exposed on Dynamo's system port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ampd.telemetry.metrics.names import METRICS, PREFIX, Kind, Metric, Process
from ampd.telemetry.metrics.values import Counter, Histogram

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

_LOG = logging.getLogger(__name__)
_READ_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """A value that lives elsewhere, as read now. `labels`: their values in the metric's order."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


Read = Callable[[], Iterable[Reading]]


class ProcessCollector:
    """All metrics of one process: what was recorded, and what is read at the moment of the scrape.

    Each metric of the process is named in each scrape, also one that has no value yet.

    Dynamo scrapes on a thread of its own, and what is read belongs to the event loop, so it is read there. A loop that
    does not come to it within a second has none of these in that scrape; what was recorded is there all the same.

    Args:
        loop: whose state `read` reads; None: read where the scrape runs.
    """

    def __init__(
        self,
        process: Process,
        recorded: Sequence[Counter | Histogram],
        read: Read,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        names = {one.metric.name for one in recorded}
        self._mirrors = [one for one in METRICS if process in one.processes and one.name not in names]
        self._recorded = recorded
        self._read = read
        self._loop = loop

    def collect(self) -> Iterator[Family]:
        """Prometheus's families; `CollectorRegistry` calls this at each scrape."""
        for one in self._recorded:
            yield _counter(one) if isinstance(one, Counter) else _histogram(one)
        try:
            readings = _on_loop(self._loop, self._read)
        except Exception as error:
            _LOG.warning("metrics that mirror state are left out of a scrape: %r", error)
            return
        yield from _mirrored(self._mirrors, readings)


def expose(
    collector: ProcessCollector, endpoint: Any, *, namespace: str, component: str, name: str, model_name: str
) -> None:
    """Add a collector to what Dynamo's system port says at /metrics, with Dynamo's labels.

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


def _mirrored(metrics: Iterable[Metric], readings: Iterable[Reading]) -> Iterator[Family]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for metric in metrics:
        kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        families[metric.name] = kind(metric.family, metric.help, labels=list(metric.labels))
    for reading in readings:
        families[reading.metric.name].add_metric(list(reading.labels), reading.value)
    yield from families.values()
