"""The rounds of the last minutes, by session: the load that a pools policy may replay under other roles."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ampd.types import Count, Moment


@dataclass(slots=True)
class RecentRound:
    """A round, as far as it has come.

    Attributes:
        sent_s: its arrival, on the clock of decisions.
        kept_tokens: the part of its prompt that the context of its session held already.
        ended_s, output_tokens, is_met: its end, its output, and whether it met its targets; None while it runs.
    """

    sent_s: Moment
    kept_tokens: Count
    prompt_tokens: Count
    ended_s: Moment | None = None
    output_tokens: Count | None = None
    is_met: bool | None = None

    def end(self, ended_s: float, output_tokens: int, is_met: bool) -> None:
        """Note the end of the round."""
        self.ended_s, self.output_tokens, self.is_met = ended_s, output_tokens, is_met


Load = Mapping[str, Sequence[RecentRound]]
"""Session -> its rounds, in the order of their arrival; no session is without a round."""


class RecentLoad:
    """Records rounds. A session is forgotten `window_s` after its latest round arrived."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._sessions: OrderedDict[str, list[RecentRound]] = OrderedDict()

    def add(self, session_id: str, arrived: RecentRound) -> None:
        """A round has arrived. Rounds come in the order of their arrival."""
        self._sessions.setdefault(session_id, []).append(arrived)
        self._sessions.move_to_end(session_id)
        self._forget(arrived.sent_s)

    def until(self, now_s: float) -> Load:
        """The rounds that arrived within the window before `now_s`."""
        self._forget(now_s)
        return rounds_since(self._sessions, now_s - self._window_s)

    def _forget(self, now_s: float) -> None:
        while self._sessions:
            session_id, rounds = next(iter(self._sessions.items()))
            if rounds[-1].sent_s >= now_s - self._window_s:
                return
            del self._sessions[session_id]


def rounds_since(load: Load, since_s: float) -> Load:
    """The rounds that arrived at `since_s` or later."""
    recent = {name: [item for item in rounds if item.sent_s >= since_s] for name, rounds in load.items()}
    return {name: rounds for name, rounds in recent.items() if rounds}


def latest_rounds(load: Load, most_rounds: int) -> Load:
    """The rounds that arrived last, at most `most_rounds` (and those that arrived at the same time as the first)."""
    arrivals = sorted((item.sent_s for item in all_rounds(load)), reverse=True)
    return rounds_since(load, arrivals[most_rounds - 1]) if len(arrivals) > most_rounds else load


def all_rounds(load: Load) -> Iterator[RecentRound]:
    for rounds in load.values():
        yield from rounds
