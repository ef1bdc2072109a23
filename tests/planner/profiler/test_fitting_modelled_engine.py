"""Measuring the modelled engine gives back the performance model that it runs on."""

from __future__ import annotations

import datetime
from asyncio import Event, get_running_loop, sleep
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ampd.cli.profile import EngineProbe
from ampd.perf.fit import fit_mixed
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.profile import (
    DecodeCurve,
    DecodeSegment,
    MixedPassCosts,
    ParallelismCurves,
    PerformanceProfile,
    PrefillCurve,
    PrefillSegment,
    Provenance,
    TransferCurve,
    TransferSegment,
)
from ampd.serving.kv_tiers import Found
from ampd.tiny_model import TinyModel, make_tiny_model
from ampd.types import Parallelism
from planner.profiler import Grid, Points, fit_profile, measure
from tests.virtual_time import run_virtually
from workers.engines.base import EngineOutput, EngineRequest
from workers.engines.modelled import ModelledEngine
from workers.engines.modelled_tokens import read_model_folder

TP1 = Parallelism(1)
PROVENANCE = Provenance(
    kind="measured", source="a test", model="none", gpu="none", date=datetime.date(2026, 1, 1), method="invented"
)
# Increments above a page: the modelled engine takes what is not longer as a step of its decode batch.
GRID = Grid(
    prefill=tuple((hist, incr) for hist in (0, 512, 1024, 2048) for incr in (32, 64, 128, 256, 384, 512, 768, 1024)),
    decode=tuple((batch, context) for batch in (1, 2, 3, 4, 6, 8, 12) for context in (64, 512, 1500)),
    transfer=(16, 64, 128, 256, 512, 768, 1024, 2048, 3072),
)
PREFILL = PrefillCurve(
    history_s_per_token=2e-6,
    segments=(
        PrefillSegment(from_incr_tokens=0, alpha_s=0.012, beta_s_per_token=1.9e-4, gamma_s_per_token2=3e-8),
        PrefillSegment(from_incr_tokens=256, alpha_s=0.0, beta_s_per_token=4e-4, gamma_s_per_token2=3e-8),
    ),
)
DECODE = DecodeCurve(
    context_s_per_token=5e-7, segments=(DecodeSegment(from_batch=0, alpha_s=0.004, beta_s_per_sequence=6e-4),)
)
TRANSFER = TransferCurve(
    tp_source=1, tp_target=1, segments=(TransferSegment(from_tokens=0, alpha_s=0.004, beta_s_per_token=2e-6),)
)
TRUTH = PiecewiseModel(
    PerformanceProfile(
        provenance=PROVENANCE,
        workers=(ParallelismCurves(tp=1, prefill=PREFILL, decode=DECODE),),
        kv_transfers=(TRANSFER,),
        kv_bytes_per_token=64,
        host_link_bytes_per_s=1e6,
    )
)
MODULES = ("ampd.cli.profile", "workers.engines.modelled_request", "workers.kv.modelled")


async def measured(folder: Path, clock_of: pytest.MonkeyPatch, capacity_tokens: int = 65_536) -> tuple[Points, int]:
    """The points of a modelled engine, and the tokens that its sessions still hold afterwards."""
    async with probed(folder, TRUTH, clock_of, capacity_tokens) as (engine, probe):
        points = await measure(probe, GRID, 2, 1, lambda: None, {})
        return points, engine.kv.session_tokens


@asynccontextmanager
async def probed(
    folder: Path, model: PiecewiseModel, clock_of: pytest.MonkeyPatch, capacity_tokens: int
) -> AsyncIterator[tuple[ModelledEngine, EngineProbe]]:
    engine = ModelledEngine(read_model_folder(folder), model, TP1, capacity_tokens, capacity_tokens)
    # The exchange took its clock when its module was loaded.
    clock_of.setattr(engine.kv, "_clock", get_running_loop().time)
    await engine.start()
    try:
        yield engine, EngineProbe(engine, engine.kv.without_engine(max(GRID.transfer)), 1)
    finally:
        await engine.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes = TinyModel(layers=1, hidden_size=32, heads=2, kv_heads=1, head_dim=16, max_context_tokens=4096)
    return make_tiny_model(tmp_path / "tiny", sizes)


@pytest.mark.slow
def test_the_curves_of_the_modelled_engine_are_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points, left_tokens = run_virtually(measured(folder, monkeypatch), monkeypatch, *MODULES)
    assert points.discarded == 0
    assert left_tokens == 0, "a measurement leaves nothing behind"
    # In virtual time nothing disturbs a prefill or a KV move.
    for hist, incr, seconds in points.prefill:
        assert seconds == pytest.approx(TRUTH.prefill_s(hist, incr, TP1), rel=1e-4), (hist, incr)
    for tokens, seconds in points.transfer:
        assert seconds == pytest.approx(TRUTH.kv_transfer_s(tokens, TP1, TP1), rel=1e-4), tokens
    for tokens, seconds in points.reload:
        assert seconds == pytest.approx(TRUTH.reload_s(tokens, TP1), rel=1e-4), tokens
    assert len(points.reload) == len(GRID.transfer)
    # A batch is measured while it generates: up to 2 * 16 tokens more of context a sequence than the point says.
    for batch, context, seconds in points.decode:
        least, most = (TRUTH.decode_step_s(batch, context + batch * more, TP1) for more in (0, 32))
        assert least * (1 - 1e-4) <= seconds <= most * (1 + 1e-4), (batch, context)
    profile = fit_profile(points, PROVENANCE, 1, 0.2, 1, kv_bytes_per_token=64)
    assert profile.host_link_bytes_per_s == pytest.approx(1e6, rel=1e-3)
    assert [segment.from_incr_tokens for segment in profile.workers[0].prefill.segments] == [0, 256]
    assert profile.workers[0].decode.context_s_per_token == pytest.approx(5e-7, rel=0.05)
    # What is left are the generated tokens of the decode batches.
    errors = profile.provenance.fit_error
    assert errors["prefill_max"] < 1e-3
    assert errors["kv_transfer_max"] < 1e-3
    assert errors["decode_max"] < 0.01


def test_what_mixed_passes_save_is_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = MixedPassCosts(saved=0.6, context_s_per_token=1e-6)
    curves = TRUTH.profile.workers[0].model_copy(update={"mixed_passes": {"modelled": costs}})
    model = PiecewiseModel(TRUTH.profile.model_copy(update={"workers": (curves,)}))

    async def points() -> list[tuple[int, int, int, float]]:
        found = []
        async with probed(folder, model, monkeypatch, 65_536) as (_, probe):
            for batch, context, incr in ((2, 64, 64), (8, 64, 256), (4, 512, 128), (8, 500, 512)):
                seconds = await probe.mixed_pass_s(batch, context, incr)
                assert seconds is not None
                found.append((batch, batch * context, incr, seconds))
        return found

    found = fit_mixed(run_virtually(points(), monkeypatch, *MODULES), TRUTH, TP1)
    # A batch has some more tokens of context than the point says.
    assert found.saved == pytest.approx(0.6, abs=0.02)
    assert found.context_s_per_token == pytest.approx(1e-6, rel=0.1)


def test_a_history_that_the_engine_lost_is_not_measured_as_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost() -> tuple[float | None, float | None]:
        async with probed(folder, TRUTH, monkeypatch, 4096) as (engine, probe):
            monkeypatch.setattr(engine, "_found", lambda _keys: Found(16))
            return await probe.prefill_s(16, 64), await probe.prefill_s(512, 64)

    held, evicted = run_virtually(lost(), monkeypatch, *MODULES)
    assert held is not None
    assert evicted is None


def test_the_clock_starts_when_the_history_is_in_the_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that goes on delays the prefill behind it: here by a second, unless it is waited for."""

    async def behind_a_write() -> float | None:
        async with probed(folder, TRUTH, monkeypatch, 65_536) as (engine, probe):
            generate, writes = engine.generate, Event()

            async def settle(_timeout_s: float) -> None:
                writes.set()

            async def late(request: EngineRequest) -> AsyncIterator[EngineOutput]:
                if request.max_new_tokens and not writes.is_set():
                    await sleep(1.0)
                async for output in generate(request):
                    yield output

            monkeypatch.setattr(engine.kv.store, "settle", settle)
            monkeypatch.setattr(engine, "generate", late)
            return await probe.prefill_s(512, 64)

    seconds = run_virtually(behind_a_write(), monkeypatch, *MODULES)
    assert seconds == pytest.approx(TRUTH.prefill_s(512, 64, TP1), rel=1e-4)
