"""A worker's engine shares passes if the worker's slicing policy says so."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from ampd.errors import UserError
from ampd.perf.piecewise import load_performance_model
from workers.engines import check_engine, create_engine, settings_model
from workers.settings import WorkerSettings


@pytest.fixture
def with_weights(model_folder: Path, tmp_path: Path) -> Path:
    folder = copytree(model_folder, tmp_path / "with-weights")
    (folder / "model.safetensors").touch()
    return folder


def settings(engine: str, model: Path, slicing: str, **more: Any) -> WorkerSettings:
    given: Any = {"role": "decode", "engine": engine, "model": model, "slicing": slicing, **more}
    return settings_model(engine)(**given)


@pytest.mark.parametrize("engine", ["modelled", "sglang"])
@pytest.mark.parametrize(
    ("slicing", "shares"),
    [("slack", False), ("slack(mixes=true)", True), ("slack(mixes=true,quantum=0.2)", True), ("whole", False)],
)
def test_the_slicing_policy_says_whether_the_engine_shares_passes(
    engine: str, slicing: str, shares: bool, with_weights: Path
) -> None:
    made: Any = create_engine(settings(engine, with_weights, slicing), load_performance_model("tiny-cpu"))
    shared = made.sizes is not None if engine == "modelled" else made._shares_passes
    assert shared is shares


def test_sglang_without_cut_prefills_is_refused_before_the_worker_joins_its_graph(with_weights: Path) -> None:
    uncut = {"engine_args": '{"chunked_prefill_size": -1}'}
    check_engine(settings("sglang", with_weights, "slack", **uncut), "worker")
    with pytest.raises(UserError, match=r"^worker: --engine-args: chunked_prefill_size=-1 does not work"):
        check_engine(settings("sglang", with_weights, "slack(mixes=true)", **uncut), "worker")
