"""`ampd replay`: replay a trace against an OpenAI endpoint, print the result, write JSON and a report."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import uvloop
from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg, CliSuppress
from tqdm import tqdm

from ampd.documents import check_writable
from ampd.errors import UserError, without_credentials
from ampd.keys import SESSION_HEADER
from ampd.progress import Progress
from ampd.settings import Settings, parse_settings
from ampd.types import Slo
from workloads.endpoint import (
    SAFE_TOKENS,
    Chunk,
    CommonStart,
    Dialect,
    Endpoint,
    History,
    RequestError,
    TokenHistory,
    TokenRange,
    WordHistory,
    synthetic_token_ids,
    synthetic_words,
)
from workloads.report import figures_table, series_of, write_replay_report
from workloads.results import (
    PromptTokens,
    RoundRecord,
    error_lines,
    headline,
    prompt_tokens_note,
    require_attainment,
    summarise,
)
from workloads.trace import Session, load_trace, retime, shipped_traces

# -- replaying sessions against an endpoint: arrivals in an open loop, the rounds of a session in a closed one

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


PROG = "ampd replay"
_INTERRUPTED = 130


class Api(StrEnum):
    """Kind of requests; `auto` takes completions with token ids if the endpoint returns them, else chat."""

    AUTO = "auto"
    CHAT = "chat"
    COMPLETIONS = "completions"


class ReplaySettings(Settings):
    """Replay a trace of agent sessions against an OpenAI endpoint."""

    known_names: ClassVar = {"trace": shipped_traces}
    topics: ClassVar = {"url": "endpoint", "ttft": "targets", "rate": "load", "json_file": "results"}

    trace: CliPositionalArg[str] = Field(description="Trace file, or the name of a shipped trace.")
    url: str = Field("http://127.0.0.1:8000", description="The endpoint, with or without /v1.")
    model: str | None = Field(None, description="Model to ask for; default: the first served one.")
    api: Api = Field(Api.AUTO, description="Completions with token ids keep counts exact; auto prefers them.")
    api_key: CliSuppress[str | None] = Field(None, description="Sent as a bearer token.")
    ttft: float | None = Field(None, gt=0, description="TTFT target of a round in seconds.")
    itl: float | None = Field(None, gt=0, description="ITL target of a round in seconds.")
    fail_under: float | None = Field(
        None, gt=0, le=1, description="Exit code 1 if a smaller share of the rounds is within both targets."
    )
    rate: float | None = Field(
        None, description="Replace the arrivals by a Poisson process of this many sessions per second."
    )
    time_scale: float = Field(1.0, ge=0, description="Factor on arrivals and tool gaps.")
    limit: int | None = Field(None, ge=1, description="How many sessions; with --rate they are repeated as needed.")
    seed: int = Field(0, description="Seed of arrivals and of synthetic prompts.")
    concurrency: int | None = Field(None, ge=1, description="Most sessions in flight; default: unlimited.")
    timeout: float = Field(600.0, gt=0, description="Seconds after which a round counts as failed.")
    json_file: Path | None = Field(None, validation_alias="json", description="Write the result object to this file.")
    report: Path | None = Field(None, description="Write an HTML report to this file.")

    @model_validator(mode="after")
    def _both_targets(self) -> ReplaySettings:
        if (self.ttft is None) is not (self.itl is None):
            raise ValueError("--ttft and --itl go together: give both or none")
        return self

    @property
    def slo(self) -> Slo | None:
        return None if self.ttft is None or self.itl is None else Slo(self.ttft, self.itl)


def run(argv: Sequence[str]) -> int:
    """Run the replay; 0 done, 1 every round failed, 130 interrupted (the partial result is printed and written).

    Raises:
        UserError: wrong flags, a malformed trace, a URL that does not answer.
        RunError: the endpoint understands none of our requests, or the attainment is less than `--fail-under`.
    """
    settings = parse_settings(ReplaySettings, argv, PROG)
    if settings.fail_under is not None and settings.slo is None:
        raise UserError(f"{PROG}: --fail-under needs the targets: give --ttft and --itl")
    sessions = retime(load_trace(settings.trace, settings.limit), settings.rate, settings.seed, settings.limit)
    check_writable(settings.json_file, settings.report)
    _check_text(sessions, settings)
    done, plan = uvloop.run(_replay(sessions, settings))
    result = _result(done, plan, settings)
    print("\n".join(_told(result, [record.error for record in done.records if record.error])))
    if settings.json_file:
        records = [_record_row(record) for record in done.records]
        settings.json_file.write_text(json.dumps(result | {"records": records}, indent=1) + "\n", encoding="utf-8")
    if settings.report:
        write_replay_report(settings.report, result)
    if done.stopped:
        return _INTERRUPTED
    require_attainment(result["attainment"]["rounds"], settings.fail_under, PROG)
    return 1 if result["errors"] and not result["rounds"] else 0


def _told(result: dict[str, Any], errors: Sequence[str]) -> Iterator[str]:
    yield from (headline(result), "", figures_table({"replay": result}))
    if note := prompt_tokens_note(result):
        yield f"prompt tokens: {note}"
    yield from error_lines(errors)


async def _replay(sessions: Sequence[Session], settings: ReplaySettings) -> tuple[ReplayRun, ReplayPlan]:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with Endpoint(settings.url, settings.api_key, settings.timeout) as endpoint:
        model, is_dynamo = await endpoint.choose_model(settings.model)
        prompts = {
            "ids": synthetic_token_ids(8, "probe", SAFE_TOKENS.first, SAFE_TOKENS.last),
            "text": synthetic_words(8, "probe"),
            "messages": [{"role": "user", "content": synthetic_words(8, "probe")}],
        }
        dialect = await endpoint.negotiate(model, _api(sessions, settings), is_dynamo, prompts)
        print(f"{endpoint.base}: model {model}, {dialect}", file=sys.stderr)
        plan = ReplayPlan(
            model=model,
            dialect=dialect,
            run_id=uuid4().hex[:12],
            seed=settings.seed,
            time_scale=settings.time_scale,
            concurrency=settings.concurrency,
            timeout_s=settings.timeout,
            slo=settings.slo,
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        with closing(_Progress(sum(len(session.rounds) for session in sessions))) as progress:
            return await replay(sessions, endpoint, plan, stop, progress.add), plan


class _Progress:
    """A bar on stderr, and the first few errors as they occur."""

    _SHOWN_ERRORS = 3

    def __init__(self, rounds: int) -> None:
        self._errors = 0
        self._bar = Progress("rounds", rounds, "round")

    def add(self, record: RoundRecord) -> None:
        self._bar.update()
        if record.error is None:
            return
        self._errors += 1
        self._bar.set_postfix(errors=self._errors)
        if self._errors <= self._SHOWN_ERRORS:
            tqdm.write(f"{record.session_id} round {record.index}: {record.error}", file=sys.stderr)

    def close(self) -> None:
        self._bar.close()


def _api(sessions: Sequence[Session], settings: ReplaySettings) -> str:
    """The kind of requests. Real words are sent as chat unless the user chose completions."""
    has_text = any(item.text is not None for session in sessions for item in session.rounds)
    if not has_text:
        return settings.api
    return "words" if settings.api is Api.COMPLETIONS else Api.CHAT


def _result(done: ReplayRun, plan: ReplayPlan, settings: ReplaySettings) -> dict[str, Any]:
    result = {"kind": "replay"} | summarise(done.records, done.rounds_planned, plan.slo, done.duration_s)
    result["interrupted"] = done.stopped
    result["prompt_tokens"] = _prompt_tokens(done.records)
    result["client_lag_max_s"] = max((record.lag_s for record in done.records), default=0.0)
    result["settings"] = {
        "trace": settings.trace,
        "url": without_credentials(settings.url),
        "model": plan.model,
        "api": str(plan.dialect),
        "rate": settings.rate,
        "time_scale": settings.time_scale,
        "limit": settings.limit,
        "seed": settings.seed,
        "concurrency": settings.concurrency,
        "timeout_s": settings.timeout,
        "run_id": plan.run_id,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    result["series"] = series_of(done.records, plan.slo)
    return result


def _prompt_tokens(records: Sequence[RoundRecord]) -> dict[str, int]:
    """Tokens of the prompts by the trace and by the server, of the rounds whose prompts the server counted."""
    counted = [(record.prompt, tokens) for record in records if (tokens := record.prompt.prompt_tokens) is not None]
    return {
        "trace": sum(prompt.hist_tokens + prompt.incr_tokens for prompt, _ in counted),
        "server": sum(tokens for _, tokens in counted),
    }


def _record_row(record: RoundRecord) -> dict[str, Any]:
    """A record in the JSON file."""
    return {
        "session_id": record.session_id,
        "round": record.index,
        "sent_s": record.sent_s,
        **asdict(record.prompt),
        "output_tokens": record.output_tokens,
        "ttft_s": record.ttft_s,
        "itl_s": record.itl_s,
        "e2e_s": record.e2e_s,
        "lag_s": record.lag_s,
        "error": record.error,
        "decision": record.decision,
    }


def _check_text(sessions: Sequence[Session], settings: ReplaySettings) -> None:
    rounds = [item for session in sessions for item in session.rounds]
    with_text = sum(item.text is not None for item in rounds)
    if 0 < with_text < len(rounds):
        print(
            f"{settings.trace}: {len(rounds) - with_text} rounds have no text and get synthetic words", file=sys.stderr
        )
