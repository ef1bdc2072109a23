"""What tests of recorders and readers share: a real Prometheus registry, and the sums of its samples."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from ampd.telemetry.metrics.exposition import ProcessCollector


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
