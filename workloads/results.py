"""From the records of rounds to the result object that live runs and simulations share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ampd.errors import RunError
from ampd.reports import counted, format_share
from ampd.types import Slo

_PERCENTS = (50, 95, 99)


@dataclass(slots=True)
class PromptTokens:
    """The tokens of a round's prompt, as the trace has them and as the server counted them.

    Attributes:
        hist_tokens, incr_tokens: kept context and new tokens, by the trace.
        prompt_tokens, cached_tokens: the whole prompt, and its part that was cached, by the server; None: not reported.
    """

    hist_tokens: int
    incr_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(slots=True)
class RoundRecord:
    """One round as measured by its client.

    Attributes:
        index: position in its session; 0 is the initial prefill.
        sent_s: when the round was sent, in seconds from the start of the run.
        output_tokens: generated tokens.
        ttft_s: from `sent_s` to the first token.
        gaps_s: every gap between consecutive tokens; the tokens of one chunk share its gap equally.
        e2e_s: from `sent_s` to the last token.
        lag_s: delay of the sending against the plan, which the client caused and not the server.
        error: reason of a failure.
        decision: the server's report about the round (`nvext.engine_data`), unchanged.
    """

    session_id: str
    index: int
    sent_s: float
    prompt: PromptTokens
    output_tokens: int = 0
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    e2e_s: float | None = None
    lag_s: float = 0.0
    error: str | None = None
    decision: Mapping[str, Any] = field(default_factory=dict)

    @property
    def itl_s(self) -> float | None:
        """Mean gap between the round's tokens; None with fewer than two tokens."""
        return sum(self.gaps_s) / len(self.gaps_s) if self.gaps_s else None

    @property
    def input_tokens(self) -> int:
        """Tokens of the whole prompt: as the server counted them, or else by the trace."""
        prompt = self.prompt
        return prompt.prompt_tokens or prompt.hist_tokens + prompt.incr_tokens

    @property
    def route(self) -> str | None:
        """Where the round was prefilled, if the server reported it."""
        route = self.decision.get("route")
        return route if isinstance(route, str) else None


class RoundOutcome(Protocol):
    """The fields of a round that a result needs: of `RoundRecord` live, of `SimulatedRound` in a simulation."""

    @property
    def session_id(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def ttft_s(self) -> float | None: ...
    @property
    def itl_s(self) -> float | None: ...
    @property
    def e2e_s(self) -> float | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def route(self) -> str | None: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...


def meets(outcome: RoundOutcome, slo: Slo) -> bool:
    """Whether a round succeeded with its TTFT and its mean ITL within the targets."""
    return outcome.error is None and slo.met(outcome.ttft_s, outcome.itl_s)


class Attainment(NamedTuple):
    """Shares of the rounds, and of the sessions with all their rounds, that met the targets."""

    rounds: float
    sessions: float


def attainment(records: Sequence[RoundOutcome], rounds_planned: Mapping[str, int], slo: Slo) -> Attainment:
    """Attainment of a run; 0 of nothing. `rounds_planned` as in `shared_result`."""
    met: dict[str, int] = {}
    seen: dict[str, int] = {}
    for record in records:
        seen[record.session_id] = seen.get(record.session_id, 0) + 1
        met[record.session_id] = met.get(record.session_id, 0) + meets(record, slo)
    due = sum(max(rounds_planned.get(name, 0), count) for name, count in seen.items())
    whole = sum(met.get(name, 0) == rounds for name, rounds in rounds_planned.items())
    return Attainment(sum(met.values()) / due if due else 0.0, whole / len(rounds_planned) if rounds_planned else 0.0)


def summarise(
    records: Sequence[RoundRecord], rounds_planned: Mapping[str, int], slo: Slo | None, duration_s: float
) -> dict[str, Any]:
    """The shared keys of a live run's result. See `shared_result`."""
    done = [record for record in records if record.error is None and record.ttft_s is not None]
    return shared_result(
        records,
        rounds_planned,
        slo,
        duration_s,
        itl_s=percentiles([gap_s for record in done for gap_s in record.gaps_s]),
        kv_bytes={
            "history": _total(done, "kv_read_bytes_history"),
            "increment": _total(done, "kv_read_bytes_increment"),
        },
    )


def shared_result(
    outcomes: Sequence[RoundOutcome],
    rounds_planned: Mapping[str, int],
    slo: Slo | None,
    duration_s: float,
    *,
    itl_s: Mapping[str, float | None],
    kv_bytes: Mapping[str, int | None],
) -> dict[str, Any]:
    """The shared keys of a result, live or simulated.

    `rounds_planned`: session id -> number of its rounds, for the sessions that ended or failed. A round that was never
    sent because an earlier one of its session failed counts as missed, so that failing early cannot help. The
    sessions of an interrupted run that neither ended nor failed are not in `rounds_planned`; their finished rounds
    count, and they count as no session. `itl_s`: percentiles of all gaps between tokens. The result also has those of
    the rounds' mean ITL, which targets apply to, as `mean_itl_s`.
    """
    done = [outcome for outcome in outcomes if outcome.error is None and outcome.ttft_s is not None]
    ttfts = [(outcome.index, outcome.ttft_s) for outcome in done if outcome.ttft_s is not None]
    return {
        "attainment": _attainment(outcomes, rounds_planned, slo),
        "ttft_s": percentiles([ttft_s for _, ttft_s in ttfts]),
        "ttft_initial_s": percentiles([ttft_s for index, ttft_s in ttfts if index == 0]),
        "ttft_incremental_s": percentiles([ttft_s for index, ttft_s in ttfts if index > 0]),
        "itl_s": dict(itl_s),
        "mean_itl_s": percentiles([outcome.itl_s for outcome in done if outcome.itl_s is not None]),
        "e2e_s": percentiles([outcome.e2e_s for outcome in done if outcome.e2e_s is not None]),
        "routes": {name: sum(outcome.route == name for outcome in done) for name in ("local", "remote")},
        "rounds": len(done),
        "sessions": len({outcome.session_id for outcome in outcomes}),
        "errors": sum(outcome.error is not None for outcome in outcomes),
        "duration_s": duration_s,
        "kv_bytes": dict(kv_bytes),
        "output_tokens": sum(outcome.output_tokens for outcome in done),
        "throughput": _throughput(done, slo, duration_s),
        "input_length_tokens": percentiles([outcome.input_tokens for outcome in done]),
        "output_length_tokens": percentiles([outcome.output_tokens for outcome in done]),
        "slo": {"ttft": slo.ttft_s, "itl": slo.itl_s} if slo else None,
    }


def _throughput(done: Sequence[RoundOutcome], slo: Slo | None, duration_s: float) -> dict[str, float | None]:
    """Over the whole run. `goodput`: within both targets; `per_user`: 1 / the mean ITL; `rounds_in_flight`:
    on average."""
    itls = [outcome.itl_s for outcome in done if outcome.itl_s]
    met = sum(meets(outcome, slo) for outcome in done) if slo else None
    sums = {
        "rounds_per_s": len(done),
        "goodput_rounds_per_s": met,
        "input_tokens_per_s": sum(outcome.input_tokens for outcome in done),
        "output_tokens_per_s": sum(outcome.output_tokens for outcome in done),
        "rounds_in_flight": sum(outcome.e2e_s or 0.0 for outcome in done),
    }
    rates = {name: value / duration_s if value is not None and duration_s else None for name, value in sums.items()}
    return rates | {"output_tokens_per_s_per_user": len(itls) / sum(itls) if itls else None}


def local_share(result: Mapping[str, Any]) -> float | None:
    """The share of rounds that were prefilled locally; None if the result has no routes."""
    routed = sum(result["routes"].values())
    return result["routes"]["local"] / routed if routed else None


def percentiles(values_s: ArrayLike, counts: NDArray[np.int64] | None = None) -> dict[str, float | None]:
    """Mean, p50, p95 and p99 of values, each of which occurred `counts` times (once by default); None without any."""
    data = np.asarray(values_s, dtype=float)
    if not data.size:
        return {"mean": None, "p50": None, "p95": None, "p99": None}
    p50, p95, p99 = (
        float(value) for value in (np.percentile(data, _PERCENTS) if counts is None else _weighted(data, counts))
    )
    return {"mean": float(np.average(data, weights=counts)), "p50": p50, "p95": p95, "p99": p99}


def _weighted(data: NDArray[np.float64], counts: NDArray[np.int64]) -> list[float]:
    """`np.percentile` of every value repeated as often as it occurred, without repeating it."""
    order = np.argsort(data)
    ordered, ends = data[order], np.cumsum(counts[order])
    results = []
    for percent in _PERCENTS:
        rank = percent / 100 * (ends[-1] - 1)
        low, high = ordered[np.searchsorted(ends, [np.floor(rank), np.ceil(rank)], side="right")]
        results.append(float(low + (high - low) * (rank - np.floor(rank))))
    return results


def _attainment(
    records: Sequence[RoundOutcome], rounds_planned: Mapping[str, int], slo: Slo | None
) -> dict[str, float | None]:
    if slo is None:
        return {"rounds": None, "sessions": None}
    reached = attainment(records, rounds_planned, slo)
    return {"rounds": reached.rounds if records else None, "sessions": reached.sessions if rounds_planned else None}


def _total(records: Sequence[RoundRecord], key: str) -> int | None:
    values = [record.decision[key] for record in records if isinstance(record.decision.get(key), int | float)]
    return int(sum(values)) if values else None


def require_attainment(share: float | None, least: float | None, prog: str) -> None:
    """Fail a command whose attainment of the rounds is less than its `--fail-under`.

    Args:
        share: None: nothing was attained.
        least: None: any share is enough.

    Raises:
        RunError: it is less.
    """
    if least is not None and (share or 0.0) < least:
        raise RunError(f"{prog}: {format_share(share or 0.0)} of the rounds met both targets, --fail-under {least:g}")


# -- the rounds of a replay that missed their targets: which, when, by how much, and why, if the server reports it

_SMALL = 0.1
"""A part of a TTFT below this share is not named as its cause."""


class MissedRound(NamedTuple):
    """One round that failed or missed a target.

    Attributes:
        targets: those that it missed, each with the value.
        causes: the parts of its time, from its decision record; empty if there is none.
    """

    sent_s: float
    session_id: str
    round_index: int
    targets: str
    causes: str


def missed_rounds(records: Sequence[RoundRecord], slo: Slo, most: int | None = None) -> list[MissedRound]:
    """The missed rounds in the order in which they were sent. `most`: only the first so many."""
    missed = [record for record in records if not meets(record, slo)]
    return [_missed(record, slo) for record in sorted(missed, key=lambda record: record.sent_s)[:most]]


def _missed(record: RoundRecord, slo: Slo) -> MissedRound:
    targets = []
    if record.error is not None or record.ttft_s is None:
        targets.append(f"failed: {record.error or 'no token'}")
    else:
        if not slo.ttft_met(record.ttft_s):
            targets.append(f"TTFT {record.ttft_s * 1e3:,.0f} ms of {slo.ttft_s * 1e3:g} ms")
        if record.itl_s is not None and not slo.itl_met(record.itl_s):
            targets.append(f"ITL {record.itl_s * 1e3:,.1f} ms of {slo.itl_s * 1e3:g} ms")
    return MissedRound(record.sent_s, record.session_id, record.index, ", ".join(targets), _causes(record.decision))


def _causes(decision: Mapping[str, Any]) -> str:
    """The route with its reason, and the parts of the TTFT that took a good share of it, longest first."""
    if not decision.get("route"):
        return ""
    tokens = f"{_number(decision.get('incr_tokens')):,.0f} tokens"
    parts = [
        ("queued", _seconds(decision, "queued_s")),
        (f"prefill of {tokens}", _seconds(decision, "prefill_s")),
        ("KV reads", _seconds(decision, "kv_read_s_history") + _seconds(decision, "kv_read_s_increment")),
        ("KV reload", _seconds(decision, "kv_reload_s")),
    ]
    whole_s = max(_seconds(decision, "ttft_s"), sum(seconds for _, seconds in parts))
    causes = [f"{name} {seconds * 1e3:,.0f} ms" for name, seconds in _largest(parts) if seconds > _SMALL * whole_s]
    hits = decision.get("hit_tokens")
    if recomputed := _number(hits.get("recomputed") if isinstance(hits, Mapping) else None):
        causes.append(f"{recomputed:,.0f} tokens of the history recomputed")
    if retries := _number(decision.get("retries")):
        causes.append(f"{retries:.0f} workers lost")
    return "; ".join([f"{decision['route']} ({decision.get('reason') or '-'})", *causes])


def _largest(parts: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted(parts, key=lambda part: -part[1])


def _seconds(decision: Mapping[str, Any], name: str) -> float:
    return _number(decision.get(name))


def _number(value: object) -> float:
    """A value of a foreign server's report; 0 if it is none."""
    return float(value) if isinstance(value, int | float) else 0.0


# -- what is told of a replay beside its figures

_SHOWN_ERRORS = 3
_EXACT = 0.01
"""Prompts whose lengths differ from the trace's by at most this share count as exact."""


def prompt_tokens_note(result: Mapping[str, Any]) -> str:
    """By how much the server's prompts differed from the trace's; empty if they did not, or if no server counted."""
    tokens = result.get("prompt_tokens") or {"trace": 0, "server": 0}
    if abs(tokens["server"] - tokens["trace"]) <= _EXACT * tokens["trace"]:
        return ""
    times = tokens["server"] / tokens["trace"]
    return f"{times:.2f} times the trace's, by the server's count; only prompts of token ids keep the trace's lengths"


def headline(result: Mapping[str, Any]) -> str:
    """What was replayed, in one line."""
    state = ", interrupted" if result.get("interrupted") else ""
    return (
        f"{counted(result['sessions'], 'session')}, {counted(result['rounds'], 'round')}, "
        f"{result['output_tokens']} tokens generated in {result['duration_s']:.1f} s, {result['errors']} errors{state}"
    )


_TOO_LONG = re.compile(r"(\d+) tokens\b.*maximum context length is (\d+) tokens")
"""As our coordinators word it."""


def error_lines(errors: Sequence[str]) -> list[str]:
    """The most frequent messages. Sessions that do not fit are one line, because each has its own number of tokens."""
    too_long = {error: found for error in errors if (found := _TOO_LONG.search(error))}
    if too_long:
        longest, limit = (max(int(found[group]) for found in too_long.values()) for group in (1, 2))
        line = f"sessions do not fit: the longest prompt has {longest} tokens, the longest context is {limit}"
        errors = [line if error in too_long else error for error in errors]
    kinds = Counter(errors).most_common()
    lines = [f"error               {count} x {message}" for message, count in kinds[:_SHOWN_ERRORS]]
    if len(kinds) > _SHOWN_ERRORS:
        lines.append(f"                    and {len(kinds) - _SHOWN_ERRORS} other messages")
    return lines
