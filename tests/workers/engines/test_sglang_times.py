"""Times of SGLang's passes, for batches that only have the fields which are read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ampd.perf.corrections import MIXED, PREFILL, STEP, CorrectedModel
from ampd.perf.presets import load_performance_model
from ampd.types import Factors, Parallelism
from workers.engines.sglang_plugin import LaunchedPass, launched_pass, note_end, note_launch

MODEL = load_performance_model("tiny-cpu")


def request(prompt: int, output: int = 0) -> Any:
    return SimpleNamespace(origin_input_ids=[0] * prompt, output_ids=[0] * output)


def batch(
    mode: str, *requests: Any, parts: list[tuple[int, int]] | None = None, beside: Any = None, loads: bool = False
) -> Any:
    rows = [*(parts or []), *((len(each.origin_input_ids), 1) for each in beside or ())]
    return SimpleNamespace(
        reqs=[*requests, *(beside or ())],
        forward_mode=SimpleNamespace(is_decode=lambda: mode == "decode", is_extend=lambda: mode == "extend"),
        prefix_lens=[history for history, _ in rows],
        extend_lens=[new for _, new in rows],
        decoding_reqs=beside,
        hicache_consumer_index=0 if loads else -1,
    )


@pytest.mark.parametrize(
    ("launched", "kind", "expected"),
    [
        pytest.param(
            batch("decode", request(100, 4), request(50, 1)), STEP, LaunchedPass(7.0, [], 2, 155), id="a step"
        ),
        pytest.param(
            batch("extend", request(300), request(64), parts=[(100, 200), (0, 64)]),
            PREFILL,
            LaunchedPass(7.0, [(100, 200), (0, 64)], 0, 0),
            id="prefills",
        ),
        pytest.param(
            batch("extend", request(300), parts=[(100, 200)], beside=[request(90, 10)]),
            MIXED,
            LaunchedPass(7.0, [(100, 200)], 1, 100),
            id="both",
        ),
    ],
)
def test_a_batch_is_a_pass(launched: Any, kind: int, expected: LaunchedPass) -> None:
    found = launched_pass(launched, 7.0)
    assert found == expected
    assert found is not None
    assert found.kind == kind


@pytest.mark.parametrize("unmeasured", [batch("extend", request(9), parts=[(0, 9)], loads=True), batch("idle")])
def test_passes_that_load_or_compute_nothing_are_not_measured(unmeasured: Any) -> None:
    assert launched_pass(unmeasured, 7.0) is None


class Scheduler:
    """Runs passes in virtual time, as SGLang's overlapped scheduler: the next pass is launched before the last ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, measures: bool = True) -> None:
        self.now_s = 100.0
        self.told: list[Factors] = []
        self.times = CorrectedModel(MODEL, Parallelism())
        self.ampd_passes = SimpleNamespace(
            times=self.times if measures else None, linker=SimpleNamespace(tell_factors=self.told.append)
        )
        monkeypatch.setattr("workers.engines.sglang_plugin.time", SimpleNamespace(monotonic=lambda: self.now_s))

    def launch(self, launched: Any) -> Any:
        return note_launch(lambda *_: SimpleNamespace(), self, launched)

    def end(self, result: Any, seconds: float) -> None:
        def wait(*_: Any) -> None:
            self.now_s += seconds

        note_end(wait, self, None, result)


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_time_of_a_pass_is_that_of_its_computation(monkeypatch: pytest.MonkeyPatch, overlaps: bool) -> None:
    scheduler = Scheduler(monkeypatch)
    launched = batch("decode", request(1000, 4))
    true_s = 1.5 * MODEL.decode_step_s(1, 1004, Parallelism())
    running = scheduler.launch(launched)
    for _ in range(int(30 / true_s)):
        if overlaps:
            following = scheduler.launch(launched)
            scheduler.end(running, true_s)
            running = following
        else:
            scheduler.end(running, true_s)
            scheduler.now_s += 5.0  # it is idle
            running = scheduler.launch(launched)
    factors = scheduler.times.parallelism.factors
    assert factors.step == pytest.approx(1.5, rel=0.03)
    assert (factors.prefill, factors.mixed) == (1.0, 1.0)
    assert scheduler.told[-1] == factors
    assert len(scheduler.told) < 200, "small changes are not told"


def test_a_pass_that_loads_is_left_out_but_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch)
    step = batch("decode", request(1000, 4))
    step_s = MODEL.decode_step_s(1, 1004, Parallelism())
    for _ in range(200):
        loading = scheduler.launch(batch("extend", request(9), parts=[(0, 9)], loads=True))
        following = scheduler.launch(step)
        scheduler.end(loading, 9.0)
        scheduler.end(following, step_s)
    assert scheduler.times.parallelism.factors == Factors()
    assert not scheduler.told


def test_an_engine_that_is_profiled_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch, measures=False)
    scheduler.end(scheduler.launch(batch("decode", request(1000))), 9.0)
    assert not scheduler.told
