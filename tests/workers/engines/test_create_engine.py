"""A worker's engine asks the worker's slicing policy."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from ampd.errors import UserError
from ampd.perf.corrections import CorrectedModel
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import load_performance_model
from ampd.serving.pass_sizes import NextPass
from ampd.types import Parallelism, PrefillTask, RunningRound, Slo
from workers.engines import create_engine, settings_model
from workers.engines.sglang_settings import engine_arguments
from workers.settings import WorkerSettings

TASK = PrefillTask("t", "s", 0, 500, 0.0, Slo(1.0, 0.1))
ROUNDS = [RunningRound(tokens=5, elapsed_s=0.55, itl_slo_s=0.1, context_tokens=100)]


@pytest.fixture
def with_weights(model_folder: Path, tmp_path: Path) -> Path:
    folder = copytree(model_folder, tmp_path / "with-weights")
    (folder / "model.safetensors").touch()
    return folder


def settings(engine: str, model: Path, slicing: str, **more: Any) -> WorkerSettings:
    given: Any = {"role": "decode", "engine": engine, "model": model, "slicing": slicing, **more}
    return settings_model(engine)(**given)


def times() -> CorrectedModel:
    return CorrectedModel(load_performance_model("tiny-cpu"), Parallelism())


def test_a_modelled_engine_asks_the_slicing_policy_of_its_worker(with_weights: Path) -> None:
    made: Any = create_engine(settings("modelled", with_weights, "whole"), times())
    assert made.sizes.next(TASK, 500, ROUNDS, 1.0) == NextPass(500)
    made = create_engine(settings("modelled", with_weights, "slack"), times())
    assert made.sizes.next(TASK, 500, ROUNDS, 1.0) == NextPass(0)


@pytest.mark.parametrize("has_model", [True, False])
def test_sglang_gets_the_names_for_its_passes(has_model: bool, with_weights: Path) -> None:
    """Not while its GPU is profiled."""
    named = settings("sglang", with_weights, "slack", perf="tiny-cpu")
    made: Any = create_engine(named, times() if has_model else None)
    expected = {"slicing": "slack", "perf": "tiny-cpu", "role": "decode"}
    assert made._passes == (expected if has_model else None)


def test_sglang_mixes_and_takes_the_shortest_prefill_first(with_weights: Path) -> None:
    """Only then a prefill that has begun leaves room for a round that was handed over."""

    def arguments(engine_args: str = "{}") -> dict[str, Any]:
        chosen: Any = settings("sglang", with_weights, "slack", engine_args=engine_args)
        return engine_arguments(chosen, on_gpu=True, linker={})

    assert (arguments()["schedule_policy"], arguments()["enable_mixed_chunk"]) == ("shortest-prefill-first", True)
    assert arguments('{"schedule_policy": "lpm"}')["schedule_policy"] == "lpm"


def test_a_profile_without_times_of_reloads_is_refused(model_folder: Path) -> None:
    model = load_performance_model("tiny-cpu")
    assert isinstance(model, PiecewiseModel)
    lacking = PiecewiseModel(model.profile.model_copy(update={"kv_bytes_per_token": None}))
    with pytest.raises(UserError, match="add its kv_bytes_per_token"):
        create_engine(settings("modelled", model_folder, "slack"), CorrectedModel(lacking, Parallelism()))
