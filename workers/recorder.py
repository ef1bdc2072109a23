"""What a worker counts for its metrics as rounds pass through it."""

from __future__ import annotations

from ampd.telemetry.metrics import names
from ampd.telemetry.metrics.values import Counter, Histogram
from workers.kv.exchange import KvFetch


class WorkerRecorder:
    """Counts what rounds do on a worker."""

    def __init__(self) -> None:
        self._wait, self._prefill = Histogram(names.PREFILL_WAIT), Histogram(names.PREFILL)
        self._slices = Counter(names.SLICES)
        self._read_s, self._read_bytes = Histogram(names.KV_READ_SECONDS), Counter(names.KV_READ_BYTES)
        self._read_tokens, self._failures = Counter(names.KV_READ_TOKENS), Counter(names.KV_READ_FAILURES)
        self._gap = Histogram(names.TOKEN_GAP)

    @property
    def recorded(self) -> list[Counter | Histogram]:
        """All that is counted here."""
        reads: list[Counter | Histogram] = [self._read_s, self._read_bytes, self._read_tokens, self._failures]
        return [self._wait, self._prefill, self._slices, *reads, self._gap]

    def read(self, part: str, fetch: KvFetch) -> None:
        """A read of KV from another worker has ended; one that had nothing to read is none."""
        if not fetch.tokens and fetch.error is None:
            return
        self._read_s.observe(fetch.seconds, part)
        self._read_bytes.add(fetch.bytes, part)
        self._read_tokens.add(fetch.tokens, part)
        self._failures.add(fetch.error is not None, part)

    def prefilled(self, waited_s: float, prefill_s: float, slices: int) -> None:
        """A prefill has put out its first token."""
        self._wait.observe(waited_s)
        self._prefill.observe(prefill_s)
        self._slices.add(slices)

    def gap(self, seconds: float, tokens: int) -> None:
        """A round that decodes here has put out `tokens` more, one each `seconds`."""
        self._gap.observe(seconds, count=tokens)
