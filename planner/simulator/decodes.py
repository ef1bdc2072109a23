"""Decoding in a simulation: from the first token at a prefill worker to the round's last token."""

from __future__ import annotations

from collections.abc import Callable

from planner.simulator.request import SimulatedRequest
from planner.simulator.rounds import ActiveRound
from planner.simulator.transfers import KvTransfers
from planner.simulator.world import World


class Decodes:
    """Hands remote rounds over to their decode workers, and ends all rounds.

    Args:
        finish: called when the client has the round's last token.
    """

    def __init__(self, world: World, transfers: KvTransfers, finish: Callable[[ActiveRound, float], None]) -> None:
        self._loop = world.loop
        self._hand_over_s = world.options.hand_over_s
        self._transfers = transfers
        self._finish = finish

    def hand_over(self, round_: ActiveRound) -> None:
        """The first token is out. The decode worker reads the increment before it admits the round."""
        first_token_s = self._loop.now_s
        round_.prefill.memory.protect(round_.record.session_id)
        if round_.record.output_tokens == 1:
            # The round is over for its client. Its KV still goes where the next round looks for it.
            self._loop.at(first_token_s + self._hand_over_s, self._fetch_increment, (round_, -1.0))
            self._finish(round_, first_token_s)
        elif self._hand_over_s:
            self._loop.at(first_token_s + self._hand_over_s, self._fetch_increment, (round_, first_token_s))
        else:
            self._fetch_increment((round_, first_token_s))

    def last_token(self, round_: ActiveRound, now_s: float) -> None:
        """The round's last token is out at its decode worker."""
        round_.decode.changed()
        round_.decode.batch_waits.round_ended()
        self._finish(round_, now_s)

    def _fetch_increment(self, handed: tuple[ActiveRound, float]) -> None:
        round_, first_token_s = handed
        source, target, session_id = round_.prefill, round_.decode, round_.record.session_id
        target.memory.protect(session_id)
        context_tokens = source.resident.held_tokens(session_id)
        tokens = round_.record.prefill.kv_increment_tokens = round_.begin_read(source, target, context_tokens)

        def arrived() -> None:
            source.memory.unprotect(session_id)
            self._decode(round_, first_token_s)

        self._transfers.move("kv-increment", session_id, source, target, tokens, arrived)

    def _decode(self, round_: ActiveRound, first_token_s: float) -> None:
        record, worker = round_.record, round_.decode
        session_id, memory = record.session_id, worker.memory
        if first_token_s < 0.0:
            # Before the protection ends: to make room, the memory must not evict the KV that it counts on.
            self._take_over(round_)
            memory.unprotect(session_id)
            return
        held_tokens = memory.held_tokens(session_id)
        request = SimulatedRequest(
            session_id,
            round_.prompt_tokens + 1,
            min(held_tokens, round_.prompt_tokens),
            record.output_tokens - 1,
            None,
            lambda _, now_s: self.last_token(round_, now_s),
            round_.usable_read_tokens(held_tokens),
            first_token_s,
        )
        # Its KV may be lost: then it is a prefill once more.
        request.task = round_.task
        request.history_tokens = round_.prompt_tokens // memory.page_tokens * memory.page_tokens
        worker.engine.submit(request)
        memory.unprotect(session_id)
        worker.changed()

    def _take_over(self, round_: ActiveRound) -> None:
        """Keep the KV of a round of one token, if its session is not busy with the next one already."""
        memory, session, session_id = round_.decode.memory, round_.session, round_.record.session_id
        # The next round may have rewritten the context meanwhile, and may even be over.
        tokens = min(round_.prompt_tokens, session.context_tokens)
        is_latest = session.index == round_.record.index + 1 < len(session.rounds)
        if is_latest and not memory.is_running(session_id) and memory.reserve(session_id, tokens):
            memory.settle(session_id, tokens)
