"""Rounds that another coordinator began: the rest of the output, or a clear refusal."""

from typing import Any

import pytest

from ampd.round_end import LINK
from ampd.types import Role, Slo
from router.request import RoundRequest, continued, link, parse_round
from router.round_errors import RoundOverloadedError, RoundRefusedError
from router.targets import TargetLimits
from tests.router.replica_lab import PROMPT, Replica, cluster, worker

EMITTED = [64, 65]


def again(first: dict[str, str], **fields: Any) -> dict[str, Any]:
    """The request as Dynamo's frontend sends it again after two tokens."""
    return {"token_ids": [*PROMPT, *EMITTED], "migration_link": first, **fields}


def parsed(request: dict[str, Any]) -> RoundRequest:
    return parse_round(request, TargetLimits(Slo(2.0, 0.1), 0.5))


def test_the_link_of_the_first_chunk_shows_what_is_output() -> None:
    first = link("ab" * 16, len(PROMPT), 2**32 - 1)
    assert first["trace_id"] == "ab" * 16
    assert len(first["span_id"]) == 16
    assert continued(again(first)) == (len(EMITTED), 2**32 - 1)
    assert continued(again({"span_id": f"{len(PROMPT):016x}"})) == (len(EMITTED), 0), "of an older version"
    assert continued({"token_ids": PROMPT}) is None
    assert len(link(None, 1)["trace_id"]) == 32


@pytest.mark.parametrize(
    "returned",
    [
        *({}, {"span_id": "x"}, {"span_id": f"{10**6:016x}"}, {"span_id": None}, "text"),
        *({"span_id": "-1"}, {"span_id": "1" + "0" * 16}),
    ],
)
def test_a_link_that_no_coordinator_made_is_refused(returned: Any) -> None:
    with pytest.raises(RoundRefusedError, match="malformed") as refused:
        parsed(again(returned))
    assert refused.value.status == 400


def test_tokens_that_are_out_count_for_the_least_number_of_tokens() -> None:
    request = parsed(again(link(None, len(PROMPT)), stop_conditions={"max_tokens": 3, "min_tokens": 4}))
    assert (request.continued_tokens, request.client_prompt_tokens) == (len(EMITTED), len(PROMPT))
    assert request.engine_request["stop_conditions"] == {"max_tokens": 3, "min_tokens": 2}


@pytest.mark.parametrize("sampling", [{"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}])
def test_what_depends_on_the_whole_output_is_not_continued(sampling: dict[str, float]) -> None:
    parsed({"token_ids": PROMPT, "sampling_options": sampling})
    with pytest.raises(RoundRefusedError, match="cannot be continued elsewhere; send it again") as refused:
        parsed(again(link(None, len(PROMPT)), sampling_options=sampling))
    assert refused.value.status == 503


def test_a_seed_is_continued() -> None:
    sampling = {"seed": 1, "temperature": 0.7}
    request = parsed(again(link(None, len(PROMPT)), sampling_options=sampling))
    assert request.engine_request["sampling_options"] == sampling


@pytest.mark.parametrize("routing", ["always-remote", "always-local"])
async def test_a_round_that_goes_on_has_the_tokens_and_the_usage_of_one_that_was_not_interrupted(routing: str) -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state, routing) as replica:
        whole = [chunk async for chunk in replica.chunks("whole")]
        tokens = [token for chunk in whole for token in chunk["token_ids"]]
        first = whole[0][LINK]
        assert [LINK in chunk for chunk in whole] == [True] + [False] * (len(whole) - 1)
        fields = {"token_ids": [*PROMPT, *tokens[:2]], "migration_link": first}
        rest = [chunk async for chunk in replica.chunks("rest", stop_conditions={"max_tokens": 3}, **fields)]
        assert tokens[:2] + [token for chunk in rest for token in chunk["token_ids"]] == tokens
        usage = rest[-1]["completion_usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), len(tokens))
        assert rest[0][LINK]["span_id"] == first["span_id"], "it may be continued again"


async def test_a_round_that_goes_on_was_admitted_before() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state, max_rounds=100) as replica:
        first = await anext(aiter(replica.chunks("whole")))
        replica.in_progress = 1000  # those of the coordinator that died come here
        fields = {"token_ids": [*PROMPT, *first["token_ids"]], "migration_link": first[LINK]}
        assert [chunk async for chunk in replica.chunks("rest", stop_conditions={"max_tokens": 3}, **fields)]
        with pytest.raises(RoundOverloadedError):
            await replica.round("new")
