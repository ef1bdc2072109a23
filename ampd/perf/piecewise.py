"""The piecewise alpha-beta performance model: three curves per parallelism, read from a profile.

A segment's `alpha_s` counts once when the main variable enters it. Its slope counts for the part inside it. With one
segment the times are

    prefill   alpha + beta * incr + gamma * incr * (hist + incr / 2) + history * hist + history2 * hist^2
    decode    alpha + beta * batch + context * tokens
    transfer  alpha + beta * tokens; on one host alpha, and the time to verify the bytes of the tokens
    reload    beta * tokens, from the bytes of a token on one GPU and the rate of its link to the host

`gamma` is the cost of attention: the k-th new token attends to hist + k tokens. An empty request takes no time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from ampd.errors import UserError
from ampd.perf.gpus import HOST_LINK_SHARE, host_bytes_per_s
from ampd.perf.model import MixedPasses, PerformanceModel
from ampd.perf.profile import (
    DecodeCurve,
    ParallelismCurves,
    PerformanceProfile,
    PrefillCurve,
    Provenance,
    TransferCurve,
)
from ampd.types import Parallelism

_VERIFIED_BYTES_PER_S = 50e9
"""Checksums of records in the memory of the host, in four threads."""

_Starts = tuple[int, ...]


_PrefillRow = tuple[int, float, float, float, float]
"""A segment: its first length; the time there without history; the extra time there per token of history; beta; gamma.
"""

_Prefill = tuple[_Starts, tuple[_PrefillRow, ...], float]
"""The starts of the segments, their rows, and history2. A plain tuple, because a route sums up hundreds of prefills."""


@dataclass(frozen=True, slots=True)
class _Line:
    """`rows[k]`: first value of segment k, time there, slope."""

    starts: _Starts
    rows: tuple[tuple[int, float, float], ...]

    def at(self, value: int) -> float:
        """The time at a value."""
        start, base_s, slope_s = self.rows[bisect_right(self.starts, value) - 1]
        return base_s + (value - start) * slope_s


class PiecewiseModel(PerformanceModel):
    """A performance model that evaluates a profile.

    A parallelism, or a pair of them, that the profile lacks raises a `UserError` that lists the known ones.
    """

    def __init__(
        self, profile: PerformanceProfile, name: str = "performance model", backend: str | None = None
    ) -> None:
        """A model.

        Args:
            name: the shipped profile's name or the file, for error messages.
            backend: attention backend of the engine, on which the times of mixed passes depend; None: the first one
                that the profile knows.
        """
        self.profile = profile
        self.name = name
        self.backend = backend
        self._prefill = {curves.tp: _prefill(curves.prefill) for curves in profile.workers}
        self._decode = {curves.tp: _decode(curves.decode) for curves in profile.workers}
        self._transfer = {(curve.tp_source, curve.tp_target): _transfer(curve) for curve in profile.kv_transfers}
        self._reload = {curves.tp: _reload_s_per_token(profile, curves) for curves in profile.workers}
        self._mixed = {curves.tp: _mixed(curves, backend) for curves in profile.workers}

    @property
    def provenance(self) -> Provenance:
        return self.profile.provenance

    @property
    def parallelisms(self) -> tuple[Parallelism, ...]:
        return tuple(Parallelism(tp) for tp in sorted(self._prefill))

    def prefill_s(self, hist_tokens: int, incr_tokens: int, parallelism: Parallelism) -> float:
        if incr_tokens <= 0:
            return 0.0
        try:
            starts, rows, history2_s = self._prefill[parallelism.tp]
        except KeyError:
            raise self._lacks(parallelism) from None
        start, base_s, history_s, beta_s, gamma_s = rows[bisect_right(starts, incr_tokens) - 1]
        inside = incr_tokens - start
        history_s += hist_tokens * history2_s
        seconds = base_s + hist_tokens * history_s
        seconds += inside * (beta_s + gamma_s * (hist_tokens + start + 0.5 * inside))
        return parallelism.factors.prefill * seconds

    def decode_step_s(self, batch: int, context_tokens: int, parallelism: Parallelism) -> float:
        """Time of one decode step of `batch` sequences with `context_tokens` of KV in total; 0 for an empty batch."""
        if batch <= 0:
            return 0.0
        try:
            line, context_s = self._decode[parallelism.tp]
        except KeyError:
            raise self._lacks(parallelism) from None
        return parallelism.factors.step * (line.at(batch) + context_tokens * context_s)

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:
        if tokens <= 0:
            return 0.0
        try:
            line = self._transfer[source.tp, target.tp]
        except KeyError:
            raise self._lacks_pair(source, target) from None
        if source.shares_host(target):
            return line.at(0) + tokens * (self.profile.kv_bytes_per_token or 0) / _VERIFIED_BYTES_PER_S
        return target.factors.read * line.at(tokens)

    def reload_s(self, tokens: int, parallelism: Parallelism) -> float:
        """Time to copy the KV of `tokens` from host memory; all GPUs of the replica copy their parts at the same time.

        Raises:
            UserError: the profile does not know the parallelism, or the size of a token's KV.
        """
        if tokens <= 0:
            return 0.0
        try:
            seconds_per_token = self._reload[parallelism.tp]
        except KeyError:
            raise self._lacks(parallelism) from None
        if seconds_per_token is None:
            raise UserError(f"{self.name}: no times of reloads from host memory; add its kv_bytes_per_token")
        return parallelism.factors.load * (tokens * seconds_per_token)

    def mixed_passes(self, parallelism: Parallelism) -> MixedPasses:
        try:
            return self._mixed[parallelism.tp]
        except KeyError:
            raise self._lacks(parallelism) from None

    def kv_capacity_tokens(self, parallelism: Parallelism) -> int | None:
        """KV memory of one replica in tokens; None if the profile does not contain it."""
        for curves in self.profile.workers:
            if curves.tp == parallelism.tp:
                return curves.kv_capacity_tokens
        raise self._lacks(parallelism)

    def require(self, prefill: Iterable[Parallelism], decode: Iterable[Parallelism]) -> None:
        """Check before a start that workers of these parallelisms, and KV moves both ways between them, are covered.

        Raises:
            UserError: one is not covered; the message lists the covered ones.
        """
        prefill, decode = tuple(prefill), tuple(decode)
        for parallelism in (*prefill, *decode):
            if parallelism.tp not in self._prefill:
                raise self._lacks(parallelism)
        for first, second in product(prefill, decode):
            for source, target in ((first, second), (second, first)):
                if (source.tp, target.tp) not in self._transfer:
                    raise self._lacks_pair(source, target)

    def _lacks(self, parallelism: Parallelism) -> UserError:
        known = ", ".join(str(tp) for tp in sorted(self._prefill))
        return UserError(f"{self.name}: no times for tp {parallelism.tp}; it has tp {known}")

    def _lacks_pair(self, source: Parallelism, target: Parallelism) -> UserError:
        known = ", ".join(f"{a} -> {b}" for a, b in sorted(self._transfer)) or "none"
        return UserError(f"{self.name}: no KV transfer times for tp {source.tp} -> {target.tp}; it has {known}")


def _prefill(curve: PrefillCurve) -> _Prefill:
    rows: list[_PrefillRow] = []
    for segment in curve.segments:
        start, base_s, history_s = segment.from_incr_tokens, segment.alpha_s, curve.history_s_per_token
        if rows:
            before, before_s, history_s, beta_s, gamma_s = rows[-1]
            inside = start - before
            base_s += before_s + inside * (beta_s + gamma_s * (before + 0.5 * inside))
            history_s += inside * gamma_s
        rows.append((start, base_s, history_s, segment.beta_s_per_token, segment.gamma_s_per_token2))
    return tuple(row[0] for row in rows), tuple(rows), curve.history_s_per_token2


def _line(segments: Iterable[tuple[int, float, float]]) -> _Line:
    """From (first value, alpha, slope) per segment."""
    rows: list[tuple[int, float, float]] = []
    for start, base_s, slope_s in segments:
        if rows:
            before, before_s, before_slope_s = rows[-1]
            base_s += before_s + (start - before) * before_slope_s
        rows.append((start, base_s, slope_s))
    return _Line(tuple(row[0] for row in rows), tuple(rows))


def _decode(curve: DecodeCurve) -> tuple[_Line, float]:
    segments = [(segment.from_batch, segment.alpha_s, segment.beta_s_per_sequence) for segment in curve.segments]
    return _line(segments), curve.context_s_per_token


def _transfer(curve: TransferCurve) -> _Line:
    return _line((segment.from_tokens, segment.alpha_s, segment.beta_s_per_token) for segment in curve.segments)


def _mixed(curves: ParallelismCurves, backend: str | None) -> MixedPasses:
    known = curves.mixed_passes
    costs = known.get(next(iter(known), "") if backend is None else backend)
    return MixedPasses() if costs is None else MixedPasses(costs.saved, costs.context_s_per_token)


def _reload_s_per_token(profile: PerformanceProfile, curves: ParallelismCurves) -> float | None:
    if profile.kv_bytes_per_token is None:
        return None
    bytes_per_s = profile.host_link_bytes_per_s or HOST_LINK_SHARE * host_bytes_per_s(profile.provenance.gpu)
    return profile.kv_bytes_per_token / (curves.kv_shards or curves.tp) / bytes_per_s
