"""Ids of a round, with Dynamo's own contexts; no runtime."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context as ContextVars
from functools import partial
from typing import TypeVar

import pytest
from dynamo.runtime import Context

from ampd.handler_stream import HandlerStream, Send
from ampd.telemetry import tracing
from ampd.telemetry.tracing import Trace

ResultT = TypeVar("ResultT")


async def in_new_task(work: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """As Dynamo runs a step of a handler: in a task where nothing is set."""

    async def run() -> ResultT:
        return await work()

    return await asyncio.create_task(run(), context=ContextVars())


def seen() -> str | None:
    trace = tracing.current()
    return trace.request_id if trace else None


def test_a_request_is_named_by_dynamo_s_id_and_its_calls_carry_that() -> None:
    trace = tracing.begin(Context(id="r")).of_session("s")
    assert trace.fields() == {"request_id": "r", "session_id": "s"}
    call = trace.context.detached("c")
    there = tracing.proceed(call)
    assert there.fields() == trace.fields()
    assert there.caller is None
    further = tracing.context_for_call("w1")
    assert further is not None
    assert tracing.proceed(further).fields() == trace.fields()
    assert tracing.proceed(further).caller == "w1"


def test_a_client_cannot_name_itself_otherwise() -> None:
    forged = {tracing.REQUEST_ID: "other", tracing.SESSION_ID: "other", tracing.CALLER: "other", "mine": "kept"}
    context = Context(id="r", metadata=forged)
    trace = tracing.begin(context)
    assert (trace.request_id, trace.session_id, trace.caller) == ("r", None, None)
    assert dict(context.metadata.items()) == {tracing.REQUEST_ID: "r", "mine": "kept"}


def test_a_call_without_a_coordinator_is_known_by_its_own_id() -> None:
    assert tracing.proceed(Context(id="r")).fields() == {"request_id": "r"}


def test_calls_for_a_round_whose_client_has_left_are_still_made() -> None:
    context = Context(id="r")
    tracing.begin(context)
    context.stop_generating()
    call = tracing.context_for_call("w")
    assert call is not None
    assert context.is_stopped()
    assert not call.is_stopped()
    call.stop_generating()
    other = tracing.context_for_call("w")
    assert other is not None
    assert not other.is_stopped()


def test_outside_of_a_round_there_is_no_context_for_calls() -> None:
    assert tracing.context_for_call("w") is None
    Trace("r").enter()
    assert tracing.context_for_call("w") is None


@pytest.mark.parametrize("session_id", ["\u2603 snow", "two\nlines", 'quo"te', "x" * 512])
def test_any_session_id_travels(session_id: str) -> None:
    trace = tracing.begin(Context(id="r")).of_session(session_id)
    assert tracing.proceed(trace.context.detached("c")).session_id == session_id


async def test_a_handler_works_for_its_round_whatever_task_reads_it() -> None:
    noted: list[str | None] = []

    async def serve(name: str, send: Send[int]) -> None:
        tracing.begin(Context(id=name))
        try:
            for number in range(3):
                await asyncio.sleep(0)
                noted.append(seen())
                send(number)
            await asyncio.Event().wait()
        finally:
            noted.append(seen())

    streams = [HandlerStream[int](partial(serve, name)) for name in ("one", "other")]
    for number in range(3):
        for stream in streams:
            assert await in_new_task(stream.__anext__) == number
    assert sorted(noted, key=str) == ["one"] * 3 + ["other"] * 3
    noted.clear()
    for stream in streams:
        await in_new_task(stream.aclose)
    assert noted == ["one", "other"]
    assert seen() is None


async def test_rounds_at_the_same_time_do_not_see_each_other_nor_do_their_tasks() -> None:
    turns = asyncio.Barrier(3)

    async def later() -> str | None:
        await turns.wait()
        return seen()

    async def work(name: str) -> tuple[str | None, str | None]:
        tracing.begin(Context(id=name))
        return seen(), await asyncio.create_task(later())

    names = ["a", "b", "c"]
    assert await asyncio.gather(*map(work, names)) == [(name, name) for name in names]


def test_an_error_names_the_ids_that_the_client_can_quote() -> None:
    trace = Trace("r", trace_id="t", x_request_id="x", session_id="secret")
    assert trace.quoted("no room") == "no room (trace_id t, request_id r, x_request_id x)"
