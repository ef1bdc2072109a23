"""Engine adapters by name. Each is imported only when it is chosen, so that no engine loads another's libraries."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import create_model

from ampd.errors import UserError
from ampd.model_folder import check_model_folder
from ampd.perf.corrections import CorrectedModel
from ampd.perf.presets import load_performance_model
from ampd.policies.registry import SLICING
from ampd.types import Parallelism
from workers.engines.base import Engine
from workers.kv.shared import this_host
from workers.settings import WorkerSettings


@cache
def settings_model(engine: str) -> type[WorkerSettings]:
    """The worker settings together with those of `engine` (none if it is unknown), as one flat set of flags."""
    bases = (*_engine_settings(engine), WorkerSettings)
    return create_model("WorkerSettings", __base__=bases, __doc__=WorkerSettings.__doc__)


def performance_model(settings: WorkerSettings) -> CorrectedModel:
    """The model that predicts this worker's times, and is corrected by what the worker measures.

    Raises:
        UserError: there is no such profile, it is wrong, or it does not cover this worker.
    """
    model = load_performance_model(settings.perf)
    from workers.engines.sglang_settings import SglangSettings

    parallelism = Parallelism(settings.tp, host=this_host() if isinstance(settings, SglangSettings) else "")
    model.require([parallelism], [])
    return CorrectedModel(model, parallelism)


def check_engine(settings: WorkerSettings, prog: str) -> None:
    """Check the settings before discovery and shared state are joined, as the engine would do later.

    Raises:
        UserError: the model folder or the degree cannot be used; the line starts with `prog`.
    """
    from workers.engines.sglang_settings import SglangSettings, check_ranks, check_sglang

    if isinstance(settings, SglangSettings):
        check_sglang(settings, prog)
        check_ranks(settings, prog)
    else:
        check_model_folder(settings.model, prog)


def create_engine(settings: WorkerSettings, model: CorrectedModel | None) -> Engine:
    """The engine that `settings` (made by `settings_model`) describe, not started yet.

    Args:
        model: of the engine's times. None if the engine computes and its times are not known yet.

    Raises:
        UserError: the model folder, the degree or the engine's arguments cannot be used.
    """
    if settings.engine == "modelled":
        from workers.engines.modelled import create_modelled

        assert model is not None
        return create_modelled(settings, model, SLICING.create_named(settings.slicing))
    from workers.engines.sglang import SglangEngine, SglangSettings

    if not isinstance(settings, SglangSettings):
        raise UserError("the settings are not those of the SGLang engine")
    # While a GPU is profiled there is no model, and SGLang cuts prefills as it does by itself.
    passes = None
    if model is not None:
        passes = {"slicing": settings.slicing, "perf": str(settings.perf), "role": settings.role}
    return SglangEngine(settings, model=model, passes=passes)


def _engine_settings(engine: str) -> tuple[Any, ...]:
    if engine == "modelled":
        from workers.engines.modelled import ModelledSettings

        return (ModelledSettings,)
    if engine == "sglang":
        from workers.engines.sglang import SglangSettings

        return (SglangSettings,)
    return ()
