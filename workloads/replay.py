"""Replaying sessions against an endpoint: arrivals in an open loop, the rounds of a session in a closed one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ampd.types import Slo
from workloads.endpoint import Chunk, Dialect, Endpoint, RequestError
from workloads.history import SAFE_TOKENS, CommonStart, History, TokenHistory, TokenRange, WordHistory
from workloads.results import PromptTokens, RoundRecord
from workloads.trace import Session

SESSION_HEADER = "x-dynamo-session-id"
FINAL_HEADER = "x-dynamo-session-final"
_MS_PER_S = 1e3


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """How to replay.

    Attributes:
        run_id: prefix that makes the session ids of this run unique at the server.
        time_scale: factor on arrivals and tool gaps.
        concurrency: most sessions in flight. A session that waits for a place is late; `lag_s` of its record counts it.
        timeout_s: limit of one whole round.
        slo: sent with each request if the endpoint takes it.
    """

    model: str
    dialect: Dialect
    run_id: str
    seed: int = 0
    time_scale: float = 1.0
    concurrency: int | None = None
    timeout_s: float = 600.0
    slo: Slo | None = None
    tokens: TokenRange = SAFE_TOKENS


@dataclass(slots=True)
class ReplayRun:
    """The results of a replay so far: complete when `replay` returns, partial if it was stopped.

    Attributes:
        rounds_planned: session id -> number of its rounds, for sessions that ended or failed.
    """

    records: list[RoundRecord] = field(default_factory=list)
    rounds_planned: dict[str, int] = field(default_factory=dict)
    duration_s: float = 0.0
    stopped: bool = False


OnRound = Callable[[RoundRecord], None]


async def replay(
    sessions: Sequence[Session], endpoint: Endpoint, plan: ReplayPlan, stop: asyncio.Event, on_round: OnRound
) -> ReplayRun:
    """Replay all sessions. If `stop` is set it returns the results so far. A failed round ends its session."""
    run = ReplayRun()
    start_s = time.perf_counter()
    places = asyncio.Semaphore(plan.concurrency or len(sessions) or 1)
    player = _Player(endpoint, plan, run, start_s, on_round)
    tasks = [asyncio.create_task(player.play(session, places)) for session in sessions]
    # A task that raises is a defect of this module, not of the endpoint. It must not count as a finished session.
    everything = asyncio.create_task(_all(tasks))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([everything, stopping], return_when=asyncio.FIRST_COMPLETED)
        run.stopped = not everything.done()
        if not run.stopped:
            everything.result()
    finally:
        for task in (*tasks, stopping):
            task.cancel()
        await asyncio.gather(*tasks, everything, stopping, return_exceptions=True)
    run.duration_s = time.perf_counter() - start_s
    return run


@dataclass(slots=True)
class _Player:
    endpoint: Endpoint
    plan: ReplayPlan
    run: ReplayRun
    start_s: float
    on_round: OnRound

    async def play(self, session: Session, places: asyncio.Semaphore) -> None:
        """One session from its arrival to its last round."""
        due_s = self.start_s + session.arrival_s * self.plan.time_scale
        await _sleep_until(due_s)
        async with places:
            history = self._history(session)
            for index in range(len(session.rounds)):
                if index:
                    due_s = time.perf_counter() + session.rounds[index].tool_s * self.plan.time_scale
                    await _sleep_until(due_s)
                record = await self._round(session, index, history, due_s)
                self.run.records.append(record)
                self.on_round(record)
                if record.error is not None:
                    break
        self.run.rounds_planned[session.session_id] = len(session.rounds)

    def _history(self, session: Session) -> History:
        dialect, prefix = self.plan.dialect, session.shared_prefix
        start = CommonStart(prefix.tokens, f"{self.plan.seed}/shared/{prefix.id}") if prefix is not None else None
        if dialect.token_ids:
            return TokenHistory(self.plan.tokens, start)
        return WordHistory(dialect.path != "completions", start)

    async def _round(self, session: Session, index: int, history: History, due_s: float) -> RoundRecord:
        item, plan = session.rounds[index], self.plan
        prompt = history.prompt(item, f"{plan.seed}/{session.session_id}/{index}")
        body = plan.dialect.body(plan.model, item.output_tokens, self._router()) | prompt
        headers = {SESSION_HEADER: f"{plan.run_id}.{session.session_id}"}
        if index == len(session.rounds) - 1:
            headers[FINAL_HEADER] = "true"
        sent_s = time.perf_counter()
        record = RoundRecord(
            session_id=session.session_id,
            index=index,
            sent_s=sent_s - self.start_s,
            prompt=PromptTokens(max(history.length_tokens - item.incr_tokens, 0), item.incr_tokens),
            lag_s=max(sent_s - due_s, 0.0),
        )
        stream = _Stream(record, sent_s)
        try:
            async with asyncio.timeout(plan.timeout_s):
                async for chunk in self.endpoint.stream(plan.dialect, body, headers):
                    stream.add(chunk)
            stream.finish()
        except RequestError as error:
            record.error = str(error)
        except TimeoutError:
            record.error = f"no end after {plan.timeout_s:g} s"
        history.answered(stream.text, stream.token_ids)
        return record

    def _router(self) -> dict[str, float] | None:
        slo = self.plan.slo
        return {"ttft_target": slo.ttft_s * _MS_PER_S, "itl_target": slo.itl_s * _MS_PER_S} if slo else None


@dataclass(slots=True)
class _Stream:
    """Turns the chunks of one round into its record."""

    record: RoundRecord
    sent_s: float
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    last_s: float = 0.0

    def add(self, chunk: Chunk) -> None:
        record = self.record
        if chunk.usage:
            prompt, details = record.prompt, chunk.usage.get("prompt_tokens_details") or {}
            prompt.prompt_tokens = chunk.usage.get("prompt_tokens", prompt.prompt_tokens)
            prompt.cached_tokens = details.get("cached_tokens", prompt.cached_tokens)
        if chunk.engine_data:
            record.decision = {**record.decision, **(chunk.engine_data.get("ampd") or {})}
        # Without ids a chunk with text counts as one token.
        count = len(chunk.token_ids) if chunk.token_ids is not None else int(bool(chunk.text))
        if not count:
            self.text += chunk.text
            return
        if record.ttft_s is None:
            record.ttft_s = chunk.at_s - self.sent_s
            record.gaps_s += [0.0] * (count - 1)
        else:
            record.gaps_s += [(chunk.at_s - self.last_s) / count] * count
        self.last_s = chunk.at_s
        record.output_tokens += count
        record.e2e_s = chunk.at_s - self.sent_s
        self.text += chunk.text
        self.token_ids += chunk.token_ids or []

    def finish(self) -> None:
        if self.record.ttft_s is None:
            self.record.error = "the stream ended without a token"


async def _all(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks)


async def _sleep_until(when_s: float) -> None:
    # A loop may round its timers and wake early.
    while (left_s := when_s - time.perf_counter()) > 0:  # noqa: ASYNC110
        await asyncio.sleep(left_s)
