"""`ampd replay`: replay a trace against an OpenAI endpoint, print the result, write JSON and a report."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
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
from ampd.settings import Settings, parse_settings
from ampd.types import Slo
from workloads.endpoint import Endpoint
from workloads.history import TokenRange, synthetic_token_ids, synthetic_words
from workloads.replay import ReplayPlan, ReplayRun, replay
from workloads.results import RoundRecord, format_result, summarise
from workloads.retime import retime
from workloads.trace import Session, load_trace, shipped_traces

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

    trace: CliPositionalArg[str] = Field(description="Trace file, or the name of a shipped trace.")
    url: str = Field("http://127.0.0.1:8000", description="The endpoint, with or without /v1.")
    model: str | None = Field(None, description="Model to ask for; default: the first served one.")
    api: Api = Field(Api.AUTO, description="Completions with token ids keep counts exact; auto prefers them.")
    api_key: CliSuppress[str | None] = Field(None, description="Sent as a bearer token.")
    ttft: float | None = Field(None, gt=0, description="TTFT target of a round in seconds.")
    itl: float | None = Field(None, gt=0, description="ITL target of a round in seconds.")
    rate: float | None = Field(
        None, description="Replace the arrivals by a Poisson process of this many sessions per second."
    )
    time_scale: float = Field(1.0, ge=0, description="Factor on arrivals and tool gaps.")
    limit: int | None = Field(None, ge=1, description="How many sessions; with --rate they are repeated as needed.")
    seed: int = Field(0, description="Seed of arrivals and of synthetic prompts.")
    concurrency: int | None = Field(None, ge=1, description="Most sessions in flight; default: unlimited.")
    timeout: float = Field(600.0, gt=0, description="Seconds after which a round counts as failed.")
    token_ids: str = Field("64:250", description="FIRST:LAST token id of synthetic prompts.")
    json_file: Path | None = Field(None, validation_alias="json", description="Write the result object to this file.")
    records: bool = Field(True, description="Write every round's record to the JSON file, too.")
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
        RunError: the endpoint understands none of our requests.
    """
    settings = parse_settings(ReplaySettings, argv, PROG)
    sessions = retime(load_trace(settings.trace, settings.limit), settings.rate, settings.seed, settings.limit)
    check_writable(settings.json_file, settings.report)
    _check_text(sessions, settings)
    done, plan = uvloop.run(_replay(sessions, settings, parse_token_range(settings.token_ids)))
    result = _result(done, plan, settings)
    print(format_result(result, [record.error for record in done.records if record.error]))
    if settings.json_file:
        records = {"records": [_record_row(record) for record in done.records]} if settings.records else {}
        settings.json_file.write_text(json.dumps(result | records, indent=1) + "\n", encoding="utf-8")
    if settings.report:
        # matplotlib takes a second to load, and most replays draw nothing.
        from workloads.report import write_report

        write_report(settings.report, result, done.records)
    if done.stopped:
        return _INTERRUPTED
    return 1 if result["errors"] and not result["rounds"] else 0


async def _replay(
    sessions: Sequence[Session], settings: ReplaySettings, tokens: TokenRange
) -> tuple[ReplayRun, ReplayPlan]:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with Endpoint(settings.url, settings.api_key, settings.timeout) as endpoint:
        model, is_dynamo = await endpoint.choose_model(settings.model)
        prompts = {
            "ids": synthetic_token_ids(8, "probe", tokens.first, tokens.last),
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
            tokens=tokens,
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
        self._bar: tqdm[Any] = tqdm(total=rounds, unit="round", file=sys.stderr, disable=None, leave=False)

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
    result = summarise(done.records, done.rounds_planned, plan.slo, done.duration_s)
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


_LONGEST_RANGE = 40


def parse_token_range(text: str) -> TokenRange:
    """The token ids from the first to the last of FIRST:LAST.

    Raises:
        UserError: the text is none.
    """
    first, _, last = text.partition(":")
    if len(text) > _LONGEST_RANGE or not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise UserError(f"--token-ids must be FIRST:LAST, two token ids in order (given: {text!r})")
    return TokenRange(int(first), int(last))


def _check_text(sessions: Sequence[Session], settings: ReplaySettings) -> None:
    rounds = [item for session in sessions for item in session.rounds]
    with_text = sum(item.text is not None for item in rounds)
    if 0 < with_text < len(rounds):
        print(
            f"{settings.trace}: {len(rounds) - with_text} rounds have no text and get synthetic words", file=sys.stderr
        )
