"""What an engine computed when, for the timeline."""

from __future__ import annotations

from planner.simulator.outcome import Span
from planner.simulator.request import SimulatedRequest


class ComputeSpans:
    """Records the passes of one worker's engine.

    Args:
        spans: takes the records.
    """

    __slots__ = ("_spans", "_worker_id")

    def __init__(self, worker_id: str, spans: list[Span]) -> None:
        self._worker_id = worker_id
        self._spans = spans

    def prefill(self, request: SimulatedRequest, tokens: int, start_s: float, end_s: float) -> None:
        """A pass computed `tokens` of a request."""
        self._add("prefill", start_s, end_s, {"session": request.session_id, "tokens": tokens})

    def decode(self, batch: int, steps: int, start_s: float, end_s: float) -> None:
        """A batch of requests decoded some steps."""
        self._add("decode", start_s, end_s, {"batch": batch, "steps": steps})

    def _add(self, kind: str, start_s: float, end_s: float, detail: dict[str, object]) -> None:
        self._spans.append(Span(self._worker_id, "compute", kind, start_s, end_s, detail))
