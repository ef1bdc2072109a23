"""Faults that clients cause: requests twice or out of order, requests that no worker can serve, clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import httpx

from benchmarks.faults.aims import DEATH_AIM_S
from benchmarks.faults.cluster import Member
from benchmarks.faults.fault import Fault, Scene
from benchmarks.faults.inside import DEADLY_PROMPT
from benchmarks.faults.load import RETRY_PAUSE_S
from benchmarks.faults.moments import FIRST_OUTPUT_TOKENS, HISTORY_TOKENS, LOCAL, OUTPUT_TOKENS, Moment
from benchmarks.faults.tokens import random_prompt
from tests.harness.graph import HELLO, chat, completion, session

_GROUP = "Clients"
_COMPLETIONS, _CHATS = "/v1/completions", "/v1/chat/completions"

COORDINATOR_FAILED = "a round failed in the coordinator"
"""The log line of a coordinator about an exception that it did not expect."""


def _within(schema: dict[str, Any]) -> dict[str, Any]:
    """The answer must fit the schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def _nested(levels: int) -> dict[str, Any]:
    """A JSON schema of objects in objects."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return schema


TOO_LARGE = {"a prompt of 10 MB": 10_000_000, "a prompt of 45 MB": 45_000_000}
"""Bytes of text, more than the frontends' limit of bodies."""

_BROKEN_GRAMMAR = 'root ::= ("a" | missing'
_ENDLESS_GRAMMAR = 'root ::= root root | "a"'
_EXPLODING_GRAMMAR = 'root ::= part{60,100}\npart ::= part part part | "a" | part "a" | "a" part'
_EXPLODING = "(((a{1,100}){1,100}){1,100}){60,100}"
"""A text fits it in so many ways that each further token takes longer than the one before."""

_MANY_STEPS = {"max_tokens": 60}

POISON: dict[str, dict[str, Any]] = {
    "a token id outside the vocabulary": {"prompt": [10**9] * 20},
    "a negative token id": {"prompt": [-1] * 20},
    "a stop id outside the vocabulary": {"prompt": [30] * 20, "stop_token_ids": [10**9], "min_tokens": 2},
    "no prompt": {"prompt": []},
    "a prompt that is no text": {"prompt": {"a": 1}},
    "a prompt longer than the context": {"prompt": [30] * 200_000},
    "a negative length": {"prompt": [30] * 20, "max_tokens": -1},
    "a length that is no number": {"prompt": [30] * 20, "max_tokens": "many"},
    "an unknown model": {"prompt": [30] * 20, "model": "nobody"},
    **{name: {"prompt": "x" * size} for name, size in TOO_LARGE.items()},
    "many choices": {"prompt": [30] * 300, "n": 128},
}
"""As completions."""

POISON_CHATS: dict[str, dict[str, Any]] = {
    "a target that is no number": {"nvext": {"annotations": ["ttft_target:soon"]}},
    "a target beyond all numbers": {"nvext": {"annotations": ["ttft_target:1e999", "itl_target:-1"]}},
    "targets of the smallest number": {"nvext": {"annotations": ["ttft_target:5e-324", "itl_target:5e-324"]}},
    "an EBNF grammar": {"guided_grammar": 'root ::= "yes" | "no"'},
    "an EBNF grammar without its end": {"guided_grammar": _BROKEN_GRAMMAR},
    "an EBNF grammar that refers to itself": {"guided_grammar": _ENDLESS_GRAMMAR, **_MANY_STEPS},
    "an EBNF grammar that explodes": {"guided_grammar": _EXPLODING_GRAMMAR, **_MANY_STEPS},
    "a regular expression that explodes": {"guided_regex": _EXPLODING, **_MANY_STEPS},
    "a pattern that explodes": {**_within({"type": "string", "pattern": _EXPLODING}), **_MANY_STEPS},
    "a regular expression without its end": _within({"type": "string", "pattern": "("}),
    "an expression that repeats repetitions": _within({"type": "string", "pattern": "(((a{1,50}){1,50}){1,50})"}),
    "a schema of many levels": _within(_nested(60)),
    "a schema beyond the levels that a frontend reads": _within(_nested(300)),
    "a schema that refers to itself": _within({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "a schema with thousands of values": _within({"enum": [f"value-{number}" for number in range(20_000)]}),
    "thousands of choices": {"n": 5000},
    "a penalty that makes logits infinite": {"repetition_penalty": 1e-40, "top_p": 0.9},
    "a grammar that ends before min_tokens": {**_within({"enum": ["a", "b"]}), "min_tokens": 20, "max_tokens": 30},
}
"""As chats."""

_POISON_S = 60.0
"""The longest wait for an answer. On a CPU 128 choices take long."""

LONG_SESSION_ID = "x" * 600


async def _send_twice(scene: Scene) -> None:
    """The round again, at the same time, and an old round of the session."""
    agent, victim = scene.stage.victim.agent, scene.stage.victim
    # An answer is right for the options of its round only.
    first = agent.context[:HISTORY_TOKENS], FIRST_OUTPUT_TOKENS, LOCAL
    present = (agent.prompt, OUTPUT_TOKENS, {}) if victim.round else first
    for prompt, tokens, options in (present, first):
        sending = scene.client.send(victim.session_id, prompt, tokens, options=options)
        scene.running.append(asyncio.create_task(_completed(sending)))


async def _completed(sending: Any) -> None:
    await sending


async def _join(scene: Scene) -> None:
    await asyncio.gather(*scene.running)


async def _poison(scene: Scene) -> None:
    """Begin to send them. All together may take longer than the victim is at the moment."""
    scene.kept["frontends"] = scene.graph.of("frontend")
    scene.kept["workers"] = scene.graph.workers
    scene.kept["deaths"] = deaths_of(scene.graph.workers)
    scene.running.append(asyncio.create_task(_send_poison(scene)))


async def _send_poison(scene: Scene) -> None:
    """Each must be refused with a message, or served."""
    # Each on a connection of its own: a frontend that refuses a body closes the connection after its answer.
    lone = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=scene.client.next_url(), timeout=_POISON_S, limits=lone) as http:
        for name, options in POISON.items():
            body = {**completion([30] * 20, max_tokens=2), **options}
            scene.complaints += await complaints_of(http, name, _COMPLETIONS, body)
        chats: list[tuple[str, Any, Mapping[str, str]]] = [
            (name, {**chat(HELLO, max_tokens=2), **options}, {}) for name, options in POISON_CHATS.items()
        ]
        chats.append(("a long session id", chat(HELLO, max_tokens=2), session(LONG_SESSION_ID)))
        for name, body, headers in chats:
            scene.complaints += await complaints_of(http, name, _CHATS, body, headers)


async def complaints_of(
    http: httpx.AsyncClient, name: str, path: str, body: Any, headers: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Why the answer to a poisonous request is none that a client can use."""
    try:
        reply = await http.post(path, json=body, headers=headers)
    except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
        # A frontend answers 413 before it has read the body, and closes. Then the client may miss the answer.
        return [] if name in TOO_LARGE else [f"{name}: {error!r}"]
    except httpx.HTTPError as error:
        return [f"{name}: {error!r}"]
    is_refusal = bool(reply.text) and not reply.is_server_error
    return [] if is_refusal else [f"{name}: {reply.status_code} {reply.text}"]


async def _check_processes(scene: Scene) -> None:
    """A frontend that ended would look like one that closes a connection, and an engine that ended like a refusal."""
    if deaths := deaths_of(scene.kept["workers"]) - scene.kept["deaths"]:
        scene.complaints.append(f"{deaths} engines or workers ended")
    scene.complaints += [f"{member.name} ended" for member in scene.kept["frontends"] if not member.is_running]
    for member in scene.graph.of("coordinator"):
        scene.complaints += unexpected_failures(member.name, member.read_log())


def unexpected_failures(name: str, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rounds that failed by an exception in a coordinator, by its log. The status alone does not always show it."""
    return [f"{name}: {line['message']}" for line in lines if COORDINATOR_FAILED in str(line.get("message", ""))]


ENGINE_STARTS_AGAIN = "the engine starts again"
"""Part of a worker's log line about an engine that was lost (`workers.engines.supervised`)."""

_DEADLY_STATUSES = (
    httpx.codes.INTERNAL_SERVER_ERROR,
    httpx.codes.SERVICE_UNAVAILABLE,
    httpx.codes.TOO_MANY_REQUESTS,
)
"""Of a request under which workers died; the second one while no other worker lives, the third one under load."""

_MOST_DEATHS = 2
"""A request under which a worker died is tried at one other worker."""

_DEADLY_SENDINGS = 5
"""More than twice the number of coordinators, which take turns."""
_MOST_REFUSALS = 60
"""Behind the prefills that hold up a waiting victim, it is refused for load at first, and then sent again too."""


async def _kill_by_request(scene: Scene) -> None:
    """Begin to send it. All sendings together may take longer than the victim is at the moment."""
    scene.kept["alive"] = scene.graph.workers
    scene.running.append(asyncio.create_task(_send_deadly(scene, scene.kept["alive"])))


async def _send_deadly(scene: Scene, alive: Sequence[Member]) -> None:
    """It ends two workers at most. Sent again, as clients do, it is refused by each coordinator and ends no other."""
    # Another prompt for each run, because deaths under it are remembered.
    body = completion([*DEADLY_PROMPT, *random_prompt(scene.stage.rng(scene.stage.name), 40)], max_tokens=2)
    number = 0
    for _ in range(_DEADLY_SENDINGS + _MOST_REFUSALS):
        async with httpx.AsyncClient(base_url=scene.client.next_url(), timeout=scene.client.bound_s) as http:
            reply = await http.post(_COMPLETIONS, json=body)
        if deaths := deaths_of(alive):
            number += 1
            scene.complaints += deadly_complaints(number, reply, deaths)
        if number == _DEADLY_SENDINGS:
            return
        await asyncio.sleep(RETRY_PAUSE_S)


def deaths_of(workers: Sequence[Member]) -> int:
    """How many workers have ended, and how many engines that started again in their workers."""
    restarts = [
        line for member in workers for line in member.read_log() if ENGINE_STARTS_AGAIN in str(line.get("message"))
    ]
    return len(restarts) + sum(not member.is_running for member in workers)


def deadly_complaints(sending: int, reply: httpx.Response, deaths: int) -> list[str]:
    """What is wrong with the answer to a request that ends workers, or with the number of deaths under it."""
    found = []
    if reply.status_code not in _DEADLY_STATUSES:
        found.append(f"the deadly request got {reply.status_code} at sending {sending}: {reply.text}")
    if deaths > _MOST_DEATHS:
        found.append(f"the deadly request has ended {deaths} workers after sending {sending}")
    return found


async def _has_ended_workers(scene: Scene) -> bool:
    """A request that is refused at once proves nothing."""
    return deaths_of(scene.kept["alive"]) > 0


async def _leave(scene: Scene) -> None:
    """The client of the victim's round goes away."""
    victim = scene.stage.victim
    if victim.round is not None:
        victim.round.cancel()


REQUEST_FAULTS = [
    Fault(
        "duplicates",
        _GROUP,
        "the same round a second time at once, and an older round of the session",
        _send_twice,
        _join,
    ),
    Fault(
        "poison",
        _GROUP,
        "requests that cannot be served, of all kinds of the corpus",
        _poison,
        _join,
        check=_check_processes,
    ),
    Fault(
        "deadly-request",
        _GROUP,
        f"a request that ends each worker which takes it, sent {_DEADLY_SENDINGS} times",
        _kill_by_request,
        _join,
        has_struck=_has_ended_workers,
        aim_s=DEATH_AIM_S,
    ),
    Fault(
        "client-leaves",
        _GROUP,
        "the client of the round closes its connection",
        _leave,
        never_at=(Moment.TOOL_GAP,),
    ),
]
