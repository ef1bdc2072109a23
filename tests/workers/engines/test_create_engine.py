"""A worker's engine shares passes if the worker's slicing policy says so."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from ampd.errors import UserError
from ampd.perf.corrections import CorrectedModel
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import load_performance_model
from ampd.types import Parallelism
from workers.engines import check_engine, create_engine, settings_model
from workers.engines.sglang_settings import engine_arguments
from workers.settings import WorkerSettings


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


@pytest.mark.parametrize("engine", ["modelled", "sglang"])
@pytest.mark.parametrize(
    ("slicing", "shares"),
    [("slack", False), ("slack(mixes=true)", True), ("slack(mixes=true,quantum=0.2)", True), ("whole", False)],
)
def test_the_slicing_policy_says_whether_the_engine_shares_passes(
    engine: str, slicing: str, shares: bool, with_weights: Path
) -> None:
    made: Any = create_engine(settings(engine, with_weights, slicing), times())
    shared = made.sizes is not None if engine == "modelled" else made._shares_passes
    assert shared is shares


@pytest.mark.parametrize(("has_model", "slicing"), [(True, "slack(mixes=true)"), (False, None), (True, None)])
def test_sglang_gets_the_names_for_the_sizes_of_its_passes(
    has_model: bool, slicing: str | None, with_weights: Path
) -> None:
    """Not while its GPU is profiled, and not with a policy that shares no passes."""
    named = settings("sglang", with_weights, slicing or "slack", perf="tiny-cpu")
    made: Any = create_engine(named, times() if has_model else None)
    assert made._passes == (slicing and {"slicing": slicing, "perf": "tiny-cpu"})


@pytest.mark.parametrize("shares", [True, False])
def test_sglang_takes_the_shortest_prefill_first_where_it_shares_passes(shares: bool, with_weights: Path) -> None:
    """Only then a prefill that has begun leaves room for a round that was handed over."""

    def policy(engine_args: str = "{}") -> str | None:
        chosen: Any = settings("sglang", with_weights, "slack", engine_args=engine_args)
        arguments = engine_arguments(chosen, on_gpu=True, linker={}, shares_passes=shares)
        return arguments.get("schedule_policy")

    assert policy() == ("shortest-prefill-first" if shares else None)
    assert policy('{"schedule_policy": "lpm"}') == "lpm"


def test_sglang_without_cut_prefills_is_refused_before_the_worker_joins_its_graph(with_weights: Path) -> None:
    uncut = {"engine_args": '{"chunked_prefill_size": -1}'}
    check_engine(settings("sglang", with_weights, "slack", **uncut), "worker")
    with pytest.raises(UserError, match=r"^worker: --engine-args: chunked_prefill_size=-1 does not work"):
        check_engine(settings("sglang", with_weights, "slack(mixes=true)", **uncut), "worker")


def test_a_profile_without_times_of_reloads_is_refused(model_folder: Path) -> None:
    model = load_performance_model("tiny-cpu")
    assert isinstance(model, PiecewiseModel)
    lacking = PiecewiseModel(model.profile.model_copy(update={"kv_bytes_per_token": None}))
    with pytest.raises(UserError, match="add its kv_bytes_per_token"):
        create_engine(settings("modelled", model_folder, "slack"), CorrectedModel(lacking, Parallelism()))
