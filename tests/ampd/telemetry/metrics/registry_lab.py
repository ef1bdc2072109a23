"""Helpers of the tests of metrics: a real Prometheus registry, the sums of its samples, the metric of a sample."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from ampd.telemetry.metrics.exposition import ProcessCollector
from ampd.telemetry.metrics.names import METRICS, Kind, Metric


def registered(collector: ProcessCollector) -> CollectorRegistry:
    """A registry of its own for a process's collector."""
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def total(metrics: CollectorRegistry, name: str, **labels: str) -> float:
    """The sum of a sample's values over all labels that are not named."""
    return sum(
        sample.value
        for family in metrics.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def by_name(name: str) -> Metric | None:
    """The metric that a sample belongs to (`..._bucket`, `..._sum` and `..._count` belong to a histogram)."""
    found = {metric.name: metric for metric in METRICS}
    if name in found:
        return found[name]
    histogram = found.get(name.rpartition("_")[0])
    is_part = (
        histogram is not None and histogram.kind is Kind.HISTOGRAM and name.endswith(("_bucket", "_sum", "_count"))
    )
    return histogram if is_part else None
