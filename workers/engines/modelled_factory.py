"""Builds the modelled engine from a worker's settings."""

from __future__ import annotations

from dataclasses import replace

from ampd.errors import UserError
from ampd.perf.model import PerformanceModel
from ampd.policies.base import SlicingPolicy
from ampd.serving.pass_sizes import PassSizes
from ampd.types import Parallelism
from workers.engines.modelled import ModelledEngine
from workers.engines.modelled_settings import ModelledSettings
from workers.engines.modelled_tokens import read_model_folder
from workers.engines.planned_output import OutputPlanner
from workers.engines.replies import Replies
from workers.settings import WorkerSettings
from workers.unfailing import UnfailingSlicing


def create_modelled(settings: WorkerSettings, model: PerformanceModel, slicing: SlicingPolicy) -> ModelledEngine:
    """A modelled engine for `settings`, which must be those of `settings_model("modelled")`.

    Args:
        slicing: says whether prefills share passes with the batch, and how.

    Raises:
        UserError: the model folder or the scripted replies cannot be used.
    """
    if not isinstance(settings, ModelledSettings):
        raise UserError("the settings are not those of the modelled engine")
    facts = read_model_folder(settings.model)
    facts = replace(facts, max_context_tokens=settings.max_context_tokens or facts.max_context_tokens)
    replies = Replies.read(settings.replies) if settings.replies else None
    engine = ModelledEngine(
        facts,
        model,
        Parallelism(tp=settings.tp),
        settings.kv_capacity_tokens,
        settings.store_tokens,
        settings.page_size,
        settings.eos_every_tokens,
        OutputPlanner(settings.model, facts.eos_token_ids, replies),
    )
    if slicing.shares_passes:
        engine.sizes = PassSizes(UnfailingSlicing(slicing), model, Parallelism(tp=settings.tp), settings.page_size)
    return engine
