"""The metrics that a worker counts as rounds pass through it."""

from __future__ import annotations

from collections.abc import Mapping

from ampd.telemetry.metrics import names
from ampd.telemetry.metrics.exposition import Counter, Histogram
from workers.kv.exchange import KvFetch


class WorkerRecorder:
    """Counts the rounds of a worker."""

    def __init__(self) -> None:
        self._wait, self._prefill = Histogram(names.PREFILL_WAIT), Histogram(names.PREFILL)
        self._read_s, self._read_bytes = Histogram(names.KV_READ_SECONDS), Counter(names.KV_READ_BYTES)
        self._read_tokens, self._failures = Counter(names.KV_READ_TOKENS), Counter(names.KV_READ_FAILURES)
        self._hits, self._reload_s = Counter(names.KV_HITS), Histogram(names.KV_RELOAD_SECONDS)
        self._gap = Histogram(names.TOKEN_GAP)
        self._refused = Counter(names.CALLS_REFUSED)

    @property
    def recorded(self) -> list[Counter | Histogram]:
        reads: list[Counter | Histogram] = [self._read_s, self._read_bytes, self._read_tokens, self._failures]
        return [self._wait, self._prefill, *reads, self._hits, self._reload_s, self._gap, self._refused]

    def read(self, part: str, fetch: KvFetch) -> None:
        """A read of KV from another worker has ended. It is not counted if there was nothing to read."""
        if not fetch.tokens and fetch.error is None:
            return
        self._read_s.observe(fetch.seconds, part)
        self._read_bytes.add(fetch.bytes, part)
        self._read_tokens.add(fetch.tokens, part)
        self._failures.add(fetch.error is not None, part)

    def found(self, hit_tokens: Mapping[str, int], reload_s: float) -> None:
        """A round has ended here; `hit_tokens`: by tier. `reload_s` 0: nothing was reloaded, or it is not measured."""
        for tier, tokens in hit_tokens.items():
            self._hits.add(tokens, tier)
        if reload_s:
            self._reload_s.observe(reload_s)

    def prefilled(self, waited_s: float, prefill_s: float) -> None:
        """A prefill has ended with its first token."""
        self._wait.observe(waited_s)
        self._prefill.observe(prefill_s)

    def refused(self, reason: str) -> None:
        """A call was refused, because it was not signed as it should be."""
        self._refused.add(1, reason)

    def gap(self, seconds: float, tokens: int) -> None:
        """A round that decodes here got `tokens` more tokens, one per `seconds`."""
        self._gap.observe(seconds, count=tokens)
