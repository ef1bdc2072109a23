"""A scrape: what it holds, and where it reads."""

import asyncio
import logging
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ampd.telemetry.metrics import exposition, names
from ampd.telemetry.metrics.exposition import Counter, ProcessCollector, Reading
from ampd.telemetry.metrics.names import METRICS, Process


def scrape(collector: ProcessCollector) -> str:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


@pytest.mark.parametrize("process", Process)
def test_every_metric_of_a_process_is_named_in_every_scrape(process: Process) -> None:
    scraped = scrape(ProcessCollector(process, [], tuple))
    families = {family.name: family for family in text_string_to_metric_families(scraped)}
    exposed = [metric for metric in METRICS if process in metric.processes]
    expected = {metric.family: metric for metric in exposed if metric.kind != "histogram"}
    assert expected.keys() <= families.keys()
    for name, metric in expected.items():
        assert families[name].documentation == metric.help
        assert families[name].type == metric.kind


async def test_state_is_read_on_its_own_loop() -> None:
    """Dynamo scrapes on another thread, and no view is made for two."""
    threads = []

    def read() -> Iterator[Reading]:
        threads.append(threading.current_thread())
        yield Reading(names.QUEUE_TASKS, 3)

    collector = ProcessCollector(Process.WORKER, [], read, asyncio.get_running_loop())
    assert "ampd_prefill_queue_tasks 3.0" in await asyncio.to_thread(scrape, collector)
    assert threads == [threading.current_thread()]
    assert "ampd_prefill_queue_tasks 3.0" in scrape(collector), "and a scrape on that thread does not wait for itself"


async def test_a_loop_that_hangs_shows_what_was_counted_and_claims_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exposition, "_READ_TIMEOUT_S", 0.01)
    counter, reads = Counter(names.POSTPONEMENTS), []

    def read() -> list[Reading]:
        reads.append(1)
        return [Reading(names.QUEUE_TASKS, 3)]

    counter.add(7)
    collector = ProcessCollector(Process.WORKER, [counter], read, asyncio.get_running_loop())
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(scrape(collector)))
    with caplog.at_level(logging.WARNING):
        thread.start()
        thread.join()  # the loop does not run meanwhile
    assert "ampd_prefill_postponements_total 7.0" in texts[0]
    assert "ampd_prefill_queue_tasks" not in texts[0]
    assert "left out of a scrape" in caplog.text
    await asyncio.sleep(0.05)
    assert reads == [], "a scrape that was given up reads nothing later"


async def test_a_loop_that_has_ended_and_a_reader_that_fails_leave_the_rest() -> None:
    ended = asyncio.new_event_loop()
    ended.close()
    assert "ampd_prefill_postponements_total 0.0" in scrape(
        ProcessCollector(Process.WORKER, [Counter(names.POSTPONEMENTS)], tuple, ended)
    )

    def fails() -> Iterator[Reading]:
        yield Reading(names.QUEUE_TASKS, 3)
        raise RuntimeError("dictionary changed size")

    text = scrape(ProcessCollector(Process.WORKER, [Counter(names.POSTPONEMENTS)], fails))
    assert "ampd_prefill_postponements_total 0.0" in text
    assert "ampd_prefill_queue_tasks 3" not in text
