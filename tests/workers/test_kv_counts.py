"""Where the KV of the last minute came from: added up, and forgotten after a minute."""

from ampd.types import KvWindow
from workers.worker_view import KvCounts


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.25

    def __call__(self) -> float:
        return self.now_s


def test_the_calls_of_the_last_minute_add_up() -> None:
    clock = Clock()
    counts = KvCounts(clock)
    counts.add({"device": 1, "store": 20, "peer": 300, "recomputed": 4000}, 0.5)
    clock.now_s += 50
    counts.add({"device": 16, "store": 0, "peer": 0, "recomputed": 0}, 0.0)
    counts.add({}, 0.25)
    assert counts.read({}) == KvWindow(17, 20, 300, 4000, reloads=2, reload_s=0.75)
    clock.now_s += 20
    assert counts.read({}) == KvWindow(16, reloads=1, reload_s=0.25)
    clock.now_s += 60
    assert counts.read({}) == KvWindow()


def test_an_eviction_counts_once_however_often_the_window_is_read() -> None:
    clock = Clock()
    counts = KvCounts(clock)
    evicted = {"idle": 30, "surplus": 2}
    assert counts.read(evicted) == counts.read(evicted) == KvWindow(evicted_tokens=32)
    clock.now_s += 40
    assert counts.read({**evicted, "unused": 8}).evicted_tokens == 40
    clock.now_s += 40
    assert counts.read({**evicted, "unused": 8}).evicted_tokens == 8
