"""A modelled worker whose engine is faster or slower than its model publishes the factors, and predicts with them."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from ampd.perf.presets import load_performance_model
from ampd.policies.estimates import queued_s
from ampd.serving.placement import prefill_task
from ampd.telemetry.metrics import names
from ampd.types import Factors, Parallelism, Slo, WorkerView
from tests.workers.parts_lab import worker_parts
from workers.component import WorkerReader
from workers.engines import create_engine, performance_model, settings_model

from .engines.modelled_lab import prompt_of
from .rounds_lab import chunks_of, message

PREFILLS, TOKENS = 12, 60
SLO = Slo(1.0, 0.1)


async def served(model_folder: Path, time_scale: float) -> tuple[WorkerView, Any]:
    """The view of a worker after some rounds, and its parts."""
    named: Any = {"role": "decode", "engine": "modelled", "model": model_folder}
    settings = settings_model("modelled")(**named | {"perf": "tiny-cpu", "time_scale": time_scale})
    times = performance_model(settings)
    engine: Any = create_engine(settings, times)
    parts = worker_parts("D", engine, times)
    await engine.start()
    try:
        for number in range(PREFILLS):
            call: Any = message(prompt_of(600, seed=number), TOKENS, f"s{number}")
            async with aclosing(chunks_of(parts.rounds.generate, call)) as chunks:
                async for _ in chunks:
                    pass
        return parts.read_view(), parts
    finally:
        await engine.stop()


async def test_an_engine_as_fast_as_its_model_keeps_the_times(model_folder: Path) -> None:
    view, _ = await served(model_folder, 1.0)
    assert view.parallelism.factors == Factors()


async def test_wrong_times_are_corrected_in_view_queue_and_metrics(model_folder: Path) -> None:
    """The worker believes that everything takes 1.3 times as long as it does."""
    view, parts = await served(model_folder, 1 / 1.3)
    factors = view.parallelism.factors
    assert 1 / 1.3 - 0.01 < factors.step < 0.9
    assert 1 / 1.3 - 0.01 < factors.prefill < 0.9
    model = load_performance_model("tiny-cpu")
    queued = WorkerView("D", view.role, view.parallelism, (prefill_task("s", "s", 600, 0, arrival_s=0.0, slo=SLO),))
    assert queued_s(queued, model) == pytest.approx(factors.prefill * model.prefill_s(0, 600, Parallelism()))
    shown = {
        reading.labels[0]: reading.value for reading in WorkerReader(parts)() if reading.metric is names.TIME_FACTOR
    }
    assert (shown["step"], shown["prefill"], shown["load"]) == (factors.step, factors.prefill, 1.0)
