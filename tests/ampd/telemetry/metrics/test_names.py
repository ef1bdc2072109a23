"""The metrics keep Prometheus's conventions."""

import re

from ampd.telemetry.metrics import names
from ampd.telemetry.metrics.names import METRICS, Kind, Process
from tests.ampd.telemetry.metrics.registry_lab import by_name

UNITS = ("_seconds", "_bytes", "_tokens")
SCALED = re.compile(r"_(ms|us|ns|milliseconds|minutes|kb|mb|kib|mib|percent|ratio)(_|$)")
DYNAMO = {"dynamo_namespace", "dynamo_component", "dynamo_endpoint", "worker_id", "model", "model_name"}
RESERVED = {"le", "quantile", "job", "instance"}


def test_no_name_twice() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS) > 40
    # Prometheus's exposition calls a counter's family without `_total`.
    assert len({metric.family for metric in METRICS}) == len(METRICS)


def test_names() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"ampd_[a-z]+(_[a-z]+)*", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert not SCALED.search(metric.name), f"{metric.name}: base units are seconds, bytes, tokens"
        assert not metric.name.endswith(("_count", "_sum", "_bucket")), metric.name
        if metric.name.endswith("_info"):
            assert metric.kind is Kind.GAUGE, metric.name


def test_help_is_a_sentence() -> None:
    for metric in METRICS:
        assert metric.help[0].isupper() or metric.help[0].isdigit(), metric.name
        assert metric.help.endswith("."), metric.name
        assert "\n" not in metric.help, metric.name


def test_a_histogram_has_buckets_in_base_units() -> None:
    for metric in METRICS:
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM), metric.name
        assert sorted(set(metric.buckets)) == list(metric.buckets), metric.name
        if metric.buckets:
            assert metric.name.endswith(UNITS), metric.name


def test_buckets_span_what_is_judged() -> None:
    assert (names.TTFT.buckets[0], names.TTFT.buckets[-1]) == (0.010, 60.0)
    assert (names.ITL.buckets[0], names.ITL.buckets[-1]) == (0.001, 2.0)


def test_labels_are_few_and_do_not_hide_those_of_dynamo() -> None:
    for metric in METRICS:
        assert not metric.labels.keys() & (DYNAMO | RESERVED), metric.name
        series = len(metric.buckets) + 3
        for label, values in metric.labels.items():
            assert re.fullmatch(r"[a-z_]+", label), metric.name
            assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", value) for value in values), metric.name
            series *= max(len(values), 1)
        assert series <= 100, f"{metric.name}: {series} series of one process, words of policies aside"


def test_somebody_exposes_it() -> None:
    for metric in METRICS:
        assert metric.processes, metric.name
        assert set(metric.processes) <= set(Process), metric.name


def test_samples_belong_to_their_metric() -> None:
    assert by_name("ampd_rounds_total") is names.ROUNDS
    assert by_name("ampd_prefill_seconds_bucket") is names.PREFILL
    assert by_name("ampd_prefill_seconds_sum") is names.PREFILL
    assert by_name("ampd_rounds_total_sum") is None, "a counter has no parts"
    assert by_name("ampd_rounds") is None
    assert by_name("dynamo_frontend_requests_total") is None
