"""The profiler: it finds a modelled engine's own model again, holds points out, and refuses what cannot be."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ampd.cli.main import main
from ampd.errors import RunError, UserError
from ampd.perf.piecewise import load_performance_model
from ampd.perf.profile import Provenance, read_profile
from ampd.types import Parallelism
from planner.profiler.fitting import fit_profile
from planner.profiler.grid import Density, Grid, Limits, grid_of, split
from planner.profiler.measure import Points, measure

TP1 = Parallelism(1)
TRUE = load_performance_model("qwen3-32b-h20")
PROVENANCE = Provenance.model_validate(
    {"kind": "rough", "source": "a test", "model": "-", "gpu": "-", "date": "2026-01-01", "method": "invented"}
)


class ModelledProbe:
    """Says what a model says; every third answer is wild, and some points never come about."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.counts: dict[tuple[Any, ...], int] = {}

    def answer(self, seconds: float, *point: Any) -> float | None:
        self.calls.append(point)
        self.counts[point] = self.counts.get(point, 0) + 1
        if point == ("prefill", 512, 16):
            return None
        return 10 * seconds if self.counts[point] == 2 else seconds

    async def prefill_s(self, hist_tokens: int, incr_tokens: int) -> float | None:
        return self.answer(TRUE.prefill_s(hist_tokens, incr_tokens, TP1), "prefill", hist_tokens, incr_tokens)

    async def decode_step_s(self, batch: int, context_tokens: int) -> float | None:
        return self.answer(TRUE.decode_step_s(batch, batch * context_tokens, TP1), "decode", batch, context_tokens)

    async def transfer_s(self, tokens: int) -> float | None:
        return self.answer(TRUE.kv_transfer_s(tokens, TP1, TP1), "transfer", tokens)


def test_medians_of_the_repeats_without_the_warm_up() -> None:
    probe, done = ModelledProbe(), []
    grid = grid_of(Density.QUICK, Limits(4096, 100_000, 16))
    points = asyncio.run(measure(probe, grid, 3, 0, lambda: done.append(1)))
    assert len(done) == len(probe.calls) == 4 * len(grid)
    assert points.discarded == 3
    assert ("prefill", 512, 16) in probe.counts
    assert all((hist, incr) != (512, 16) for hist, incr, _ in points.prefill)
    for hist, incr, seconds in points.prefill:
        assert seconds == TRUE.prefill_s(hist, incr, TP1), "one wild answer of three does not move the median"
    for batch, context, seconds in points.decode:
        assert seconds == TRUE.decode_step_s(batch, context, TP1)
    rounds = [probe.calls[start : start + len(grid)] for start in range(0, len(probe.calls), len(grid))]
    assert all(sorted(map(str, one)) == sorted(map(str, rounds[0])) for one in rounds), "every point once a round"
    assert rounds[1] != rounds[2], "in another order each time"


def test_the_fit_finds_the_model_and_says_how_far_it_is_off_on_points_it_has_not_seen() -> None:
    grid = grid_of(Density.NORMAL, Limits(40_000, 400_000, 16))
    points = Points(
        [(h, i, TRUE.prefill_s(h, i, TP1)) for h, i in grid.prefill],
        [(b, b * c, TRUE.decode_step_s(b, b * c, TP1)) for b, c in grid.decode],
        [(n, TRUE.kv_transfer_s(n, TP1, TP1)) for n in grid.transfer],
    )
    profile = fit_profile(points, PROVENANCE, 1, 0.2, 0, kv_capacity_tokens=7)
    errors = profile.provenance.fit_error
    assert set(errors) == {
        f"{curve}_{what}" for curve in ("prefill", "decode", "kv_transfer") for what in ("mean", "max")
    }
    assert errors["prefill_mean"] < 0.03
    assert errors["decode_mean"] < 0.03
    assert profile.workers[0].kv_capacity_tokens == 7
    broken = Points(points.prefill, points.decode, [(n, s * (10 if n == 1024 else 1)) for n, s in points.transfer])
    held = [point for point in split(broken.transfer, 0.2, 3)[1] if point[0] == 1024]
    seeds = [seed for seed in range(20) if any(n == 1024 for n, _ in split(broken.transfer, 0.2, seed)[1])]
    assert seeds, held
    assert fit_profile(broken, PROVENANCE, 1, 0.2, seeds[0]).provenance.fit_error["kv_transfer_max"] > 0.5


def test_too_few_points_are_an_error() -> None:
    points = Points([(0, 16, 0.1)] * 4, [(1, 100, 0.1)] * 4, [(16, 0.1), (32, 0.1)])
    with pytest.raises(RunError, match="only 2 transfer points"):
        fit_profile(points, PROVENANCE, 1, 0.2, 0)


def test_the_grid_keeps_within_the_engine() -> None:
    limits = Limits(max_context_tokens=1000, kv_capacity_tokens=4000, page_tokens=16)
    grid = grid_of(Density.FULL, limits)
    assert isinstance(grid, Grid)
    assert all(hist + incr < 1000 and hist % 16 == 0 for hist, incr in grid.prefill)
    assert all(batch * context <= 2000 for batch, context in grid.decode)
    assert all(tokens < 1000 for tokens in grid.transfer)
    assert max(hist + incr for hist, incr in grid_of(Density.FULL, limits, 300).prefill) <= 300
    with pytest.raises(UserError, match="the grid is empty"):
        grid_of(Density.NORMAL, Limits(20, 40, 16))


def test_held_out_points_are_inner_ones_and_never_fitted() -> None:
    fitted, held = split(list(range(50)), 0.2, 4)
    assert len(held) == 10
    assert sorted([*fitted, *held]) == list(range(50))
    assert 0 not in held
    assert 49 not in held
    assert split(list(range(50)), 0.2, 5)[1] != held


@pytest.mark.slow
def test_a_modelled_engine_is_profiled_and_refitted_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, points, again = tmp_path / "profile.json", tmp_path / "points.json", tmp_path / "again.json"
    argv = ["profile", "--engine", "modelled", "--grid", "quick", "--repeats", "1", "--json"]
    assert main([*argv, "--output", str(file), "--points", str(points)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["points"] == {"prefill": 8, "decode": 6, "transfer": 3}
    assert result["discarded"] == 0
    true, fitted = load_performance_model("tiny-cpu"), load_performance_model(file)
    assert fitted.provenance.kind == "measured"
    assert fitted.kv_capacity_tokens(TP1) == 262_144
    for hist, incr in ((0, 256), (512, 768)):
        # Time can only be lost on a busy machine.
        assert 0.8 < fitted.prefill_s(hist, incr, TP1) / true.prefill_s(hist, incr, TP1) < 3
    assert main(["profile", "--refit", str(points), "--output", str(again)]) == 0
    assert read_profile(again) == read_profile(file)


@pytest.mark.slow
def test_real_engines_are_profiled(tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    file = tmp_path / "profile.json"
    # A process of its own: SGLang's imports warn, and here warnings are errors.
    argv = [sys.executable, "-m", "ampd", "profile", "--engine", "sglang", "--grid", "quick", "--repeats", "1"]
    argv += ["--output", str(file), "--worker-args=--max-total-tokens 16384", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["points"]["prefill"] >= 7
    assert result["points"]["decode"] == 6
    assert result["points"]["transfer"] == 3
    model = load_performance_model(file)
    assert 0 < model.prefill_s(0, 64, TP1) < model.prefill_s(0, 768, TP1)
    assert 0 < model.decode_step_s(1, 128, TP1) < model.decode_step_s(4, 2048, TP1)
    assert model.kv_transfer_s(1024, TP1, TP1) > 0
    assert model.profile.kv_bytes_per_token == 2048


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--grid", "huge"], "--grid: known are quick, normal, full"),
        (["--model", "/nowhere"], "no folder at /nowhere"),
        (["--output", "/nowhere/x.json"], "its folder must exist"),
        (["--refit", "/nowhere.json"], "cannot be read"),
        (["--repeats", "0"], "--repeats"),
        (["--engine", "other"], "--engine"),
        (["--worker-args=--no-such-flag"], "--no-such-flag"),
        (["--refit", "points.json", "--points", "x.json"], "leave one out"),
    ],
)
def test_wrong_calls_are_refused_in_one_line(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["profile", "--engine", "modelled", "--output", str(tmp_path / "x.json")]
    assert main([*argv, *flags]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [
        '{"points": 3}',
        '{"points": {"prefill": [[0, 16, 0.0]], "decode": [], "transfer": [], "discarded": 0}, "engine": {}}',
    ],
)
def test_a_file_of_other_points_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = tmp_path / "points.json"
    points.write_text(text)
    assert main(["profile", "--refit", str(points), "--output", str(tmp_path / "x.json")]) == 2
    assert "not a file of measured points" in capsys.readouterr().err
