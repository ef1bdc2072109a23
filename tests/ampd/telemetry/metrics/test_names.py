"""The metrics keep Prometheus's conventions."""

import re

import pytest

from ampd.telemetry.metrics import names
from ampd.telemetry.metrics.names import METRICS, Kind, Metric, Process
from tests.ampd.telemetry.metrics.registry_lab import by_name

PER_METRIC = pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
UNITS = ("_seconds", "_bytes", "_tokens")
SCALED = re.compile(r"_(ms|us|ns|milliseconds|minutes|kb|mb|kib|mib|percent|ratio)(_|$)")
DYNAMO = {"dynamo_namespace", "dynamo_component", "dynamo_endpoint", "worker_id", "model", "model_name"}
RESERVED = {"le", "quantile", "job", "instance"}


def test_no_name_twice() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS) > 40
    # Prometheus's exposition calls a counter's family without `_total`.
    assert len({metric.family for metric in METRICS}) == len(METRICS)


@PER_METRIC
def test_names(metric: Metric) -> None:
    assert re.fullmatch(r"ampd_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert not SCALED.search(metric.name), "base units: seconds, bytes, tokens"
    assert not metric.name.endswith(("_count", "_sum", "_bucket"))
    if metric.name.endswith("_info"):
        assert metric.kind is Kind.GAUGE


@PER_METRIC
def test_help_is_a_sentence(metric: Metric) -> None:
    assert metric.help[0].isupper() or metric.help[0].isdigit()
    assert metric.help.endswith(".")
    assert "\n" not in metric.help


@PER_METRIC
def test_a_histogram_has_buckets_in_base_units(metric: Metric) -> None:
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert sorted(set(metric.buckets)) == list(metric.buckets)
    if metric.buckets:
        assert metric.name.endswith(UNITS)


def test_buckets_span_what_is_judged() -> None:
    assert (names.TTFT.buckets[0], names.TTFT.buckets[-1]) == (0.010, 60.0)
    assert (names.ITL.buckets[0], names.ITL.buckets[-1]) == (0.001, 2.0)


@PER_METRIC
def test_labels_are_few_and_do_not_hide_those_of_dynamo(metric: Metric) -> None:
    assert not metric.labels.keys() & (DYNAMO | RESERVED)
    series = len(metric.buckets) + 3
    for label, values in metric.labels.items():
        assert re.fullmatch(r"[a-z_]+", label)
        assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", value) for value in values)
        series *= max(len(values), 1)
    assert series <= 100, "of one process, words of policies aside"


@PER_METRIC
def test_somebody_exposes_it(metric: Metric) -> None:
    assert metric.processes
    assert set(metric.processes) <= set(Process)


def test_samples_belong_to_their_metric() -> None:
    assert by_name("ampd_rounds_total") is names.ROUNDS
    assert by_name("ampd_prefill_seconds_bucket") is names.PREFILL
    assert by_name("ampd_prefill_seconds_sum") is names.PREFILL
    assert by_name("ampd_rounds_total_sum") is None, "a counter has no parts"
    assert by_name("ampd_rounds") is None
    assert by_name("dynamo_frontend_requests_total") is None
