"""Plain numbers count as prometheus_client's own metrics do."""

from collections.abc import Iterable

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from ampd.telemetry.metrics import names
from ampd.telemetry.metrics.exposition import Counter, Histogram, LabelValues, ProcessCollector, Reading
from ampd.telemetry.metrics.names import OTHER, Kind, Metric, Process

HISTOGRAM = Metric(
    Kind.HISTOGRAM, "ampd_x_seconds", (), "X.", {"direction": ("in", "out")}, buckets=(0.001, 0.01, 0.5, 2.0)
)
COUNTER = Metric(Kind.COUNTER, "ampd_y_total", (), "Y.", {"direction": ("in", "out")})
sides = st.sampled_from(["in", "out"])
# At, just beside and between the bounds.
seconds = st.sampled_from([0.0, 0.001, 0.0011, 0.01, 0.5, 0.50001, 2.0, 99.0]) | st.floats(0, 5)


def exposed(*recorded: Counter | Histogram) -> list[str]:
    registry = CollectorRegistry()
    registry.register(ProcessCollector(Process.WORKER, recorded, lambda: ()))
    ours = {values.metric.family for values in recorded}
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if any(family in line for family in ours))


def theirs(registry: CollectorRegistry) -> list[str]:
    return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)


@given(st.lists(st.tuples(seconds, sides, st.integers(1, 4)), max_size=40))
def test_a_histogram_is_exposed_as_prometheus_s_own(observations: list[tuple[float, str, int]]) -> None:
    ours, registry = Histogram(HISTOGRAM), CollectorRegistry()
    same = prometheus_client.Histogram(
        HISTOGRAM.name, HISTOGRAM.help, ["direction"], registry=registry, buckets=HISTOGRAM.buckets
    )
    same.labels("in"), same.labels("out")
    sums = {"in": 0.0, "out": 0.0}
    for value, side, count in observations:
        ours.observe(value, side, count=count)
        sums[side] += value * count
        for _ in range(count):
            same.labels(side).observe(value)
    # Sums are added in another order.
    assert _without_sums(exposed(ours)) == _without_sums(theirs(registry))
    for (side,), counts, total in ours.read():
        assert total == pytest.approx(sums[side])
        assert sum(counts) == sum(count for _, at, count in observations if at == side)


@given(st.lists(st.tuples(st.integers(0, 1 << 40), sides), max_size=40))
def test_a_counter_is_exposed_as_prometheus_s_own(additions: list[tuple[int, str]]) -> None:
    ours, registry = Counter(COUNTER), CollectorRegistry()
    same = prometheus_client.Counter(COUNTER.name, COUNTER.help, ["direction"], registry=registry)
    same.labels("in"), same.labels("out")
    for amount, side in additions:
        ours.add(amount, side)
        same.labels(side).inc(amount)
    assert exposed(ours) == theirs(registry)


def test_what_can_happen_is_known_before_it_happens() -> None:
    assert Counter(COUNTER).read() == [(("in",), 0.0), (("out",), 0.0)]
    assert [(labels, sum(counts)) for labels, counts, _ in Histogram(HISTOGRAM).read()] == [(("in",), 0), (("out",), 0)]
    assert Counter(names.STATE_ERRORS).read() == [], "words of others are not guessed"


def test_a_label_s_words_stay_few() -> None:
    values = LabelValues(most=3)
    assert [values(text) for text in ("cheapest", "itl-slack", "cheapest", "worker-lost")] == [
        "cheapest",
        "itl-slack",
        "cheapest",
        "worker-lost",
    ]
    assert values("one-too-many") == OTHER
    assert values("cheapest") == "cheapest"
    for text in ("took 3 s", "a1", "", "Upper", "ends-", 'quote"', "two\nlines", "x" * 65):
        assert LabelValues()(text) == OTHER, text


@given(st.lists(st.text(max_size=20), max_size=300))
def test_no_text_makes_more_series(texts: list[str]) -> None:
    values = LabelValues(most=16)
    assert len({values(text) for text in texts}) <= 17


def _without_sums(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if "_sum{" not in line]


def test_readings_keep_their_labels() -> None:
    registry = CollectorRegistry()
    reading = Reading(names.WORKER_ROLE, True, ("decode",))
    registry.register(ProcessCollector(Process.WORKER, [], lambda: [reading]))
    assert 'ampd_worker_role{role="decode"} 1.0' in generate_latest(registry).decode()
