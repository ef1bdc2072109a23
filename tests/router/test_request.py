from typing import Any

import pytest

from ampd.keys import session_key
from ampd.types import Slo
from router.request import RoundRequest, parse_round
from router.round_errors import RoundRefusedError
from router.targets import TargetLimits

LIMITS = TargetLimits(Slo(ttft_s=2.0, itl_s=0.1))


def parse(**fields: Any) -> RoundRequest:
    return parse_round({"token_ids": [1, 2, 3], **fields}, LIMITS)


def test_a_named_session_is_the_client_s() -> None:
    named = parse(agent_context={"session_id": "s1", "session_final": True})
    assert (named.client_session_id, named.is_named, named.is_final, named.ends_session) == ("s1", True, True, True)
    assert named.session_id == session_key("", "s1")
    assert not parse(agent_context={"session_id": "s1"}).ends_session


def test_the_header_of_affinity_names_a_session_that_no_other_header_names() -> None:
    assert parse_round({"token_ids": [1]}, LIMITS, affinity="a").client_session_id == "a"
    assert parse_round({"token_ids": [1]}, LIMITS, affinity="").client_session_id is None
    named = {"token_ids": [1], "agent_context": {"session_id": "s", "session_final": True}}
    assert parse_round(named, LIMITS, affinity="a").client_session_id == "s"
    final = {"token_ids": [1], "agent_context": {"session_final": True}}
    assert parse_round(final, LIMITS, affinity="a").is_final
    with pytest.raises(RoundRefusedError, match="256"):
        parse_round({"token_ids": [1]}, LIMITS, affinity="x" * 600)


def test_a_session_belongs_to_its_tenant() -> None:
    named = {"agent_context": {"session_id": "s1"}}
    alice, bob = (parse(routing={"cache_salt": tenant}, **named) for tenant in ("alice", "bob"))
    assert (alice.tenant, bob.tenant) == ("alice", "bob")
    assert len({alice.session_id, bob.session_id, parse(**named).session_id}) == 3
    with pytest.raises(RoundRefusedError, match="tenant") as refusal:
        parse(routing={"cache_salt": ["alice"]})
    assert refusal.value.status == 400


@pytest.mark.parametrize("session_id", ["é" * 256, "\ud800", "x" * 256, "nul\x00", "東京 😀"])
def test_any_id_has_a_short_name_in_the_graph(session_id: str) -> None:
    request = parse(agent_context={"session_id": session_id})
    assert request.session_id.isascii()
    assert len(request.session_id) == 32
    assert request.client_session_id == session_id


def test_rounds_without_a_session_are_sessions_of_their_own() -> None:
    first, second = parse(), parse(agent_context={"session_id": ""})
    assert first.session_id != second.session_id
    assert first.ends_session
    assert not first.is_named


@pytest.mark.parametrize(("asked", "sent"), [(0, 1), (1, 1), (3, 3), (None, None)])
def test_log_probabilities_come_with_a_top_one(asked: int | None, sent: int | None) -> None:
    options = {"logprobs": asked, "skip_special_tokens": True}
    request = parse(output_options=options)
    assert request.engine_request["output_options"] == {**options, "logprobs": sent}
    assert options["logprobs"] == asked


def test_the_engine_gets_its_parts_as_they_came() -> None:
    sampling = {"temperature": 0.3}
    request = parse(sampling_options=sampling, routing=None, mdc_sum="x", annotations=[])
    assert request.engine_request == {"sampling_options": sampling}


def test_a_round_belongs_to_the_tenant_that_its_salt_names() -> None:
    salted = parse(routing={"cache_salt": "acme"})
    assert (salted.tenant, salted.uncarried) == ("acme", None)
    assert salted.engine_request == {"routing": {"cache_salt": "acme"}}
    assert parse().tenant == parse(routing={}).tenant == ""


def test_who_asks_for_the_record() -> None:
    assert parse(extra_args={"nvext": {"extra_fields": ["engine_data"]}}).wants_record
    assert not parse(extra_args={"nvext": {"extra_fields": ["timing"]}}).wants_record
    assert not parse().wants_record


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"token_ids": []}, "empty"),
        ({"multi_modal_data": {"image_url": ["x"]}}, "text only"),
        ({"mm_processor_kwargs": {"use_audio": True}}, "text only"),
        ({"multi_modal_uuids": {"image_url": ["kept elsewhere"]}}, "text only"),
        ({"mm_routing_info": {"block_mm_infos": [{}]}}, "text only"),
        ({"extra_args": {"mm_hashes": ["0a"]}}, "text only"),
        ({"encoder_result": {"embeddings": 1}}, "text only"),
        ({"prompt_embeds": "AAAA"}, "text only"),
        ({"routing": {"lora_name": "adapter"}}, "without LoRA adapters"),
        ({"agent_context": {"session_id": "x" * 257}}, "256"),
        ({"routing": {"cache_salt": "x" * 257}}, "x-tenant-id"),
        ({"annotations": ["announce"]}, "needs a session id"),
        ({"sampling_options": {"repetition_penalty": 1e-40}}, "repetition_penalty must be at least"),
        ({"stop_conditions": {"stop_token_ids": list(range(65)), "min_tokens": 4}}, "with min_tokens, at most 64"),
    ],
)
def test_what_cannot_be_served_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(RoundRefusedError, match=text) as refusal:
        parse(**fields)
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"agent_context": -1},
        {"routing": [1]},
        {"token_ids": [1, "x"]},
        {"token_ids": 5},
        {"token_ids": b"\xff\xff\xff\xff"},
        {"sampling_options": {"n": 129}},
        {"stop_conditions": {"max_tokens": "5"}},
        {"stop_conditions": {"min_tokens": -1}},
        {"sampling_options": {"n": 0.5}},
        {"annotations": 3},
    ],
)
def test_a_field_of_another_type_is_the_sender_s_error(fields: dict[str, Any]) -> None:
    with pytest.raises(RoundRefusedError) as refusal:
        parse(**fields)
    assert refusal.value.status == 400


def test_a_token_id_outside_the_vocabulary_is_the_client_s_error() -> None:
    request = {"token_ids": [5, 6, 4_000_000_000]}
    with pytest.raises(RoundRefusedError, match=r"token id 4000000000 in the prompt .* 1000 tokens") as refusal:
        parse_round(request, LIMITS, 1000)
    assert refusal.value.status == 400
    assert list(parse_round(request, LIMITS).token_ids) == request["token_ids"]
