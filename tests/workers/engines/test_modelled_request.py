"""A request inside of the modelled engine: its limits, the room that it needs, and how its choices end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ampd.serving.kv_tiers import Tiers
from workers.engines.base import EngineError, EngineOutput, EngineRequest
from workers.engines.modelled_request import ActiveRequest, OutputLimits
from workers.engines.modelled_tokens import TokenSource, read_model_folder
from workers.engines.replies import PlannedOutput

EOS = 7


def request_of(most: int | None = 4, **parts: Any) -> EngineRequest:
    return EngineRequest("r", "s", list(range(100, 120)), most, parts)


def limits_of(request: EngineRequest, context_tokens: int = 1000) -> OutputLimits:
    return OutputLimits.of(request, context_tokens, (EOS,))


def outputs(active: ActiveRequest, source: TokenSource, steps: int) -> list[EngineOutput]:
    for _ in range(steps):
        for choice in active.decoding:
            active.advance(choice, source)
    found = []
    while not active.outputs.empty():
        output = active.outputs.get_nowait()
        assert isinstance(output, EngineOutput)
        found.append(output)
    return found


@pytest.fixture
def source(model_folder: Path) -> TokenSource:
    return TokenSource(read_model_folder(model_folder))


def test_limits_are_read_from_the_request_and_bounded_by_the_context() -> None:
    stop = {"min_tokens": 2, "stop_token_ids": [9], "stop_token_ids_hidden": [8]}
    limits = limits_of(request_of(50, stop_conditions=stop, sampling_options={"n": 3}), context_tokens=30)
    assert (limits.max_new_tokens, limits.min_tokens, limits.choices) == (10, 2, 3)
    assert (limits.ends, limits.stops, limits.eos_token_id) == ({EOS, 8}, {9}, EOS)
    ignoring = limits_of(request_of(stop_conditions={"ignore_eos": True}))
    assert (ignoring.ends, ignoring.eos_token_id) == (frozenset(), None)
    with pytest.raises(EngineError, match="the prompt has 20 tokens"):
        limits_of(request_of(), context_tokens=20)


@pytest.mark.parametrize(("asked", "logprobs"), [(None, None), (False, None), (0, 0), (3, 3)])
def test_log_probabilities_come_only_if_they_are_asked_for(asked: Any, logprobs: int | None) -> None:
    assert limits_of(request_of(output_options={"logprobs": asked})).logprobs == logprobs


def test_admission_counts_what_is_missing_and_a_bounded_output() -> None:
    active = ActiveRequest(request_of(None), limits_of(request_of(None), 10_000), [])
    active.tiers = Tiers(16, 0, 0, 4)
    assert (active.private_tokens, active.reserved_tokens) == (4, 4096 + 4)
    active.prefilled = True
    assert (active.private_tokens, active.reserved_tokens) == (0, 4096)


def test_each_choice_ends_at_its_length(source: TokenSource) -> None:
    request = request_of(3, sampling_options={"n": 2}, stop_conditions={"ignore_eos": True})
    active = ActiveRequest(request, limits_of(request), [])
    found = outputs(active, source, 9)
    assert [(output.index, output.finish_reason) for output in found] == [
        *[(0, None), (1, None)] * 2,
        *[(0, "length"), (1, "length")],
    ]
    assert active.finished
    assert (found[-1].prompt_tokens, found[-1].completion_tokens) == (20, 3)


def test_a_plan_is_followed_and_may_be_all(source: TokenSource) -> None:
    request = request_of(9)
    planned = ActiveRequest(request, limits_of(request), [], PlannedOutput([50, 51]))
    assert [output.token_ids for output in outputs(planned, source, 9)] == [[50], [51], [EOS]]
    whole = ActiveRequest(request, limits_of(request), [], PlannedOutput([50, 51], is_all=True))
    assert [(output.token_ids, output.finish_reason) for output in outputs(whole, source, 9)] == [
        ([50], None),
        ([51], "stop"),
    ]


def test_a_stop_token_ends_only_after_the_least_tokens(source: TokenSource) -> None:
    request = request_of(9, stop_conditions={"stop_token_ids": [50], "min_tokens": 2, "ignore_eos": True})
    active = ActiveRequest(request, limits_of(request), [], PlannedOutput([50, 50, 50]))
    assert [output.stop_reason for output in outputs(active, source, 9)] == [None, None, 50]
