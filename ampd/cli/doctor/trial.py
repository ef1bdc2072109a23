"""Runs a graph of one prefill and one decode worker, and sends it rounds: equal tokens, KV reads, a short profile."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from ampd.cli.doctor.settings import DoctorSettings
from ampd.cli.serve.devices import visible_gpus
from ampd.cli.serve.end_reasons import last_line, log_lines
from ampd.cli.serve.running import running_graph
from ampd.cli.serve.settings import EngineName
from ampd.errors import RunError
from ampd.settings import DYNAMO_PREFIX, PREFIX
from workloads.endpoint import Dialect, Endpoint, RequestError

_TIMEOUT_S = 120.0
_DIALECT = Dialect("completions", token_ids=True, nvext=True, ignore_eos=True)
_STAYS_LOCAL = {"presence_penalty": 1e-30}
"""A penalty keeps a round on its decode worker. This one is too small to change a logit."""
_TOKEN_IDS = (64, 250)
_INCREMENTS = (512, 128, 128)
"""Tokens that each round of the compared session brings. Pages are 16 tokens, so both directions read KV."""
_OUTPUT_TOKENS = 24
_MOVED_TOKENS = 4096
_PREFILLS = (256, 1024, 2048)
_BATCHES = (1, 4)
_BATCH_CONTEXT = 256
_REPEATS = 3
_KV_TOKENS = 16_384
_KV_TIMEOUT_S = 60
_LOG_LINES = 40


@dataclass(frozen=True, slots=True)
class RoundReading:
    """One round. `record`: its decision record."""

    tokens: tuple[int, ...]
    record: Mapping[str, Any]
    itl_s: float | None


@dataclass(frozen=True, slots=True)
class TrialReading:
    """All rounds of the trial.

    Attributes:
        problem: why the graph did not start or failed; empty: it served.
        logs: name -> last lines.
        remote, local, again: the rounds of one session, with its prefills on the prefill worker, and twice on the
            decode worker.
        moves: rounds that move a long prompt's KV to the decode worker.
        prefills: (tokens, seconds) of prefills without history, medians.
        steps: (sequences, tokens of all their contexts, seconds) of decode steps, medians.
    """

    problem: str = ""
    logs: Mapping[str, str] = field(default_factory=dict)
    remote: tuple[RoundReading, ...] = ()
    local: tuple[RoundReading, ...] = ()
    again: tuple[RoundReading, ...] = ()
    moves: tuple[RoundReading, ...] = ()
    prefills: tuple[tuple[int, float], ...] = ()
    steps: tuple[tuple[int, int, float], ...] = ()


def read_trial(settings: DoctorSettings, perf: str) -> TrialReading:
    """Start the graph, send the rounds, stop it.

    Args:
        perf: the performance model that the times are compared with. The modelled engine takes its times from it.
    """
    with tempfile.TemporaryDirectory(prefix="ampd-doctor-") as scratch:
        logs, errors = Path(scratch) / "logs", Path(scratch) / "serve.log"
        flags = _serve_flags(settings, perf, logs)
        try:
            with errors.open("wb") as stream, running_graph(flags, lambda _: None, _environment(), stream) as url:
                reading = asyncio.run(_rounds(url))
        except (RunError, RequestError) as error:
            is_start = isinstance(error, RunError)
            reading = TrialReading(last_line(errors).removeprefix("ampd serve: ") if is_start else str(error))
        return replace(reading, logs={file.stem: _end_of(file) for file in [errors, *sorted(logs.glob("*.log"))]})


def _serve_flags(settings: DoctorSettings, perf: str, logs: Path) -> list[str]:
    return [
        *("--prefill", "1", "--decode", "1", "--engine", settings.engine, "--model", settings.model),
        *("--perf", perf),
        *("--tp", str(settings.tp), "--routing", "always-remote", "--port", "0", "--log-dir", str(logs)),
        # Nothing is refused because it would be late, and no read is given up because the machine is slow.
        *("--max-wait", "0", "--start-timeout-s", str(settings.start_timeout_s)),
        f"--worker-args={_worker_args(settings)}",
    ]


def _worker_args(settings: DoctorSettings) -> str:
    """The user's flags, and on SGLang a KV memory that two engines may have on one GPU.

    A CPU computes in float32, because some CPUs round bfloat16 so that the same rounds end with other tokens.
    """
    given = f"--kv-timeout-s {_KV_TIMEOUT_S} {settings.worker_args}".strip()
    if settings.engine is not EngineName.SGLANG:
        return given
    usual = {"--max-total-tokens": str(_KV_TOKENS)} | ({} if visible_gpus() else {"--dtype": "float32"})
    return " ".join([*(f"{flag} {value}" for flag, value in usual.items() if flag not in given), given])


def _environment() -> dict[str, str]:
    """Ours, without the settings of another graph."""
    return {name: value for name, value in os.environ.items() if not name.startswith((PREFIX, DYNAMO_PREFIX))}


def _end_of(file: Path) -> str:
    return "\n".join(log_lines(file)[-_LOG_LINES:])


async def _rounds(url: str) -> TrialReading:
    rng = random.Random(0)
    async with Endpoint(url, None, _TIMEOUT_S) as endpoint:
        model, _ = await endpoint.choose_model(None)
        client = _Client(endpoint, model)
        parts = [_prompt(rng, count) for count in _INCREMENTS]
        remote = await client.session(parts)
        outputs = [each.tokens for each in remote]
        local, again = [await client.session(parts, outputs, _STAYS_LOCAL) for _ in range(2)]
        moves = [await client.round(_prompt(rng, _MOVED_TOKENS), 2) for _ in range(_REPEATS)]
        prefills = [
            (count, await client.prefill_s([_prompt(rng, count) for _ in range(_REPEATS)])) for count in _PREFILLS
        ]
        steps = [(batch, batch * _BATCH_CONTEXT, await client.step_s(rng, batch)) for batch in _BATCHES]
    return TrialReading(
        remote=remote, local=local, again=again, moves=tuple(moves), prefills=tuple(prefills), steps=tuple(steps)
    )


def _prompt(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(*_TOKEN_IDS) for _ in range(count)]


class _Client:
    """Sends rounds of sessions. Each session has a tenant of its own, so that none finds the KV of another."""

    def __init__(self, endpoint: Endpoint, model: str) -> None:
        self._endpoint = endpoint
        self._model = model

    async def session(
        self,
        parts: Sequence[list[int]],
        outputs: Sequence[Sequence[int]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[RoundReading, ...]:
        """The rounds of one session.

        Args:
            parts: what each round adds to the context.
            outputs: of the rounds, as the context takes them; None: the session's own.
        """
        name, rounds = uuid4().hex, list[RoundReading]()
        context: list[int] = []
        for index, part in enumerate(parts):
            context = [*context, *part]
            rounds.append(await self.round(context, _OUTPUT_TOKENS, options, name))
            context += outputs[index] if outputs else rounds[-1].tokens
        return tuple(rounds)

    async def round(
        self, prompt: list[int], output_tokens: int, options: Mapping[str, Any] | None = None, session: str = ""
    ) -> RoundReading:
        """One round. Without a session it is a session of its own."""
        name = session or uuid4().hex
        body = _DIALECT.body(self._model, output_tokens, None) | {"prompt": prompt} | dict(options or {})
        headers = {"x-dynamo-session-id": name, "x-tenant-id": f"doctor-{name}"}
        tokens: list[int] = []
        times_s: list[float] = []
        record: Mapping[str, Any] = {}
        async for chunk in self._endpoint.stream(_DIALECT, body, headers):
            record = chunk.engine_data.get("ampd") or record
            if chunk.token_ids:
                tokens += chunk.token_ids
                times_s.append(chunk.at_s)
        itl_s = (times_s[-1] - times_s[0]) / (len(tokens) - 1) if len(tokens) > 1 else None
        return RoundReading(tuple(tokens), record, itl_s)

    async def prefill_s(self, prompts: Sequence[list[int]]) -> float:
        """Median time of prefills on the decode worker, one after the other."""
        rounds = [await self.round(prompt, 1, _STAYS_LOCAL) for prompt in prompts]
        return statistics.median(float(each.record["prefill_s"]) for each in rounds)

    async def step_s(self, rng: random.Random, batch: int) -> float:
        """Median time of a decode step of several rounds at a time, as their client sees it."""
        prompts = [_prompt(rng, _BATCH_CONTEXT) for _ in range(batch)]
        rounds = await asyncio.gather(*(self.round(prompt, 2 * _OUTPUT_TOKENS, _STAYS_LOCAL) for prompt in prompts))
        return statistics.median(each.itl_s for each in rounds if each.itl_s)
