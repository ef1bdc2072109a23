"""The way of a round in a simulation: from the entry in the queue of its prefill worker to its last token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ampd.perf.corrections import READ
from ampd.serving.kv_tiers import history_tokens, reusable_tokens
from ampd.serving.prefill_queue import Pass, QueueEntry, Stage
from ampd.types import PrefillTask
from planner.simulator.options import World
from planner.simulator.outcome import Span
from planner.simulator.request import SimulatedRequest
from planner.simulator.sessions import ActiveRound
from planner.simulator.worker import SimulatedWorker


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer of KV.

    Attributes:
        left_s: remaining time in seconds if it had its link alone.
        share: its part of its link since `changed_s`.
    """

    source: str
    target: str
    left_s: float
    done: Callable[[], None]
    share: float = 0.0
    changed_s: float = 0.0
    version: int = 0

    @property
    def was_alone(self) -> bool:
        """Whether it had its links alone all the time."""
        return self.version == 1 and self.share == 1.0


class Links:
    """One full-duplex link per worker. A transfer gets an equal share of the more crowded of its two ends."""

    def __init__(self, world: World) -> None:
        self._loop = world.loop
        self._model = world.model
        self._kv_read_s = world.options.kv_read_s
        self._spans = world.spans
        self._out: dict[str, list[Transfer]] = {}
        self._in: dict[str, list[Transfer]] = {}

    def move(
        self,
        kind: str,
        session_id: str,
        source: SimulatedWorker,
        target: SimulatedWorker,
        tokens: int,
        arrived: Callable[[], None],
    ) -> None:
        """Move KV, and record that in the timeline. Calls `arrived` when it is there: at once if there are no tokens.

        `kind`: as in `Span`.
        """
        if not tokens:
            arrived()
            return
        started_s = self._loop.now_s
        seconds = self._kv_read_s + self._model.kv_transfer_s(tokens, source.parallelism, target.parallelism)

        def done() -> None:
            if self._spans is not None:
                detail: dict[str, Any] = {"session": session_id, "tokens": tokens, "from": source.worker_id}
                self._spans.append(Span(target.worker_id, "kv-in", kind, started_s, self._loop.now_s, detail))
            if transfer is not None and transfer.was_alone and target.times is not None:
                predicted_s = target.times.kv_transfer_s(tokens, source.parallelism, target.parallelism)
                target.times.measured(READ, predicted_s, self._loop.now_s - started_s - self._kv_read_s)
            arrived()

        transfer: Transfer | None = None
        if source.parallelism.shares_host(target.parallelism):
            self._loop.at(started_s + seconds, lambda _: done())
        else:
            transfer = self.start(source.worker_id, target.worker_id, seconds, done)

    def start(self, source: str, target: str, seconds: float, done: Callable[[], None]) -> Transfer:
        """Begin a transfer that takes `seconds` alone on its links; `done()` is called at its end."""
        transfer = Transfer(source, target, seconds, done)
        self._out.setdefault(source, []).append(transfer)
        self._in.setdefault(target, []).append(transfer)
        self._share_out(source, target)
        return transfer

    def _share_out(self, source: str, target: str) -> None:
        """Give every transfer at these two ends its new share."""
        for transfer in self._out[source]:
            self._give_share(transfer)
        for transfer in self._in[target]:
            if transfer.source != source:
                self._give_share(transfer)

    def _give_share(self, transfer: Transfer) -> None:
        share = 1.0 / max(len(self._out[transfer.source]), len(self._in[transfer.target]))
        if share == transfer.share:
            return
        now_s = self._loop.now_s
        transfer.left_s = max(transfer.left_s - (now_s - transfer.changed_s) * transfer.share, 0.0)
        transfer.changed_s = now_s
        transfer.share = share
        transfer.version += 1
        self._loop.at(now_s + transfer.left_s / share, self._end, (transfer, transfer.version))

    def _end(self, due: tuple[Transfer, int]) -> None:
        transfer, version = due
        if transfer.version != version:
            return  # its share has changed, and with it its end
        self._out[transfer.source].remove(transfer)
        self._in[transfer.target].remove(transfer)
        self._share_out(transfer.source, transfer.target)
        transfer.done()


class Rounds:
    """Takes rounds through the queue of their prefill worker, and remote ones over to their decode worker.

    Args:
        finish: called when the client has the round's last token.
    """

    def __init__(self, world: World, finish: Callable[[ActiveRound, float], None]) -> None:
        self._loop = world.loop
        self._hand_over_s = world.options.hand_over_s
        self._page = world.options.page_size_tokens
        self._links = Links(world)
        self._finish = finish
        self._joined: dict[Pass, list[ActiveRound]] = {}

    # -- prefill

    def enter(self, round_: ActiveRound, task: PrefillTask, *, fetches: bool) -> None:
        """Enter the round's prefill in the queue of its prefill worker. `fetches`: it has a history to read."""
        round_.prefill.queue.enter(task, fetches, partial(self._turn, round_))

    def _turn(self, round_: ActiveRound, entry: QueueEntry) -> None:
        round_.entry = entry
        if entry.stage is Stage.COMPUTING:
            self._join(round_, entry)
        elif entry.fetches:
            self._fetch_history(round_, entry)
        else:
            round_.prefill.queue.fetched(entry)

    def _fetch_history(self, round_: ActiveRound, entry: QueueEntry) -> None:
        """Read what the prefill worker lacks of the history, as far as its holder still has it."""
        session_id, source, target = round_.record.session_id, round_.holder, round_.prefill
        tokens = round_.record.kv_history_tokens = round_.begin_read(source, target, entry.task.hist_tokens)
        round_.fetched = True
        # The history that is here already goes with the part that is read: neither may be evicted before both are used.
        target.memory.protect(session_id)
        source.memory.protect(session_id)

        def arrived() -> None:
            source.memory.unprotect(session_id)
            target.queue.fetched(entry)

        self._links.move("kv-history", session_id, source, target, tokens, arrived)

    def _join(self, round_: ActiveRound, entry: QueueEntry) -> None:
        """The round's pass has a slot. The last member whose turn comes starts the pass."""
        if not round_.is_started:
            round_.is_started = True
            round_.record.queued_s = self._loop.now_s - entry.task.arrival_s
        picked = entry.picked
        assert picked is not None
        if len(picked.members) == 1:
            self._compute([round_])
            return
        joined = self._joined.setdefault(picked, [])
        joined.append(round_)
        if len(joined) == len(picked.members):
            del self._joined[picked]
            self._compute(joined)

    def _compute(self, members: Sequence[ActiveRound]) -> None:
        """Hand whole prompts to the engine, which computes the parts that are not there yet."""
        worker = members[0].prefill
        requests = [self._request(round_) for round_ in members]
        for request, round_ in zip(requests, members, strict=True):
            assert round_.entry is not None
            request.task = round_.entry.task
            request.on_pass = partial(worker.queue.passes, round_.entry)
        worker.engine.submit(*requests)
        for round_ in members:
            if round_.fetched:
                worker.memory.unprotect(round_.record.session_id)

    def _request(self, round_: ActiveRound) -> SimulatedRequest:
        record, worker = round_.record, round_.prefill
        is_local = worker is round_.decode
        held_tokens = worker.memory.held_tokens(record.session_id)
        request = SimulatedRequest(
            record.session_id,
            round_.prompt_tokens,
            reusable_tokens(round_.prompt_tokens, held_tokens, self._page),
            record.output_tokens if is_local else 1,
            lambda _, now_s: self._first_token(round_, now_s),
            (lambda _, now_s: self._last_token(round_, now_s)) if is_local else (lambda _, __: self._hand_over(round_)),
            round_.usable_read_tokens(held_tokens),
        )
        # A prefix that is here because of other sessions is history too.
        shared_tokens = worker.memory.prefix_tokens(record.session_id)
        request.history_tokens = history_tokens(record.hist_tokens, shared_tokens, self._page)
        return request

    def _first_token(self, round_: ActiveRound, now_s: float) -> None:
        record, worker, entry = round_.record, round_.prefill, round_.entry
        assert entry is not None
        record.ttft_s = now_s - record.sent_s
        worker.ttft.add(now_s - entry.task.arrival_s, now_s)
        worker.queue.leave(entry)

    # -- decode

    def _hand_over(self, round_: ActiveRound) -> None:
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

    def _last_token(self, round_: ActiveRound, now_s: float) -> None:
        """The round's last token is out at its decode worker."""
        round_.decode.changed()
        self._finish(round_, now_s)

    def _fetch_increment(self, handed: tuple[ActiveRound, float]) -> None:
        round_, first_token_s = handed
        source, target, session_id = round_.prefill, round_.decode, round_.record.session_id
        target.memory.protect(session_id)
        context_tokens = source.memory.resident.held_tokens(session_id)
        tokens = round_.record.kv_increment_tokens = round_.begin_read(source, target, context_tokens)

        def arrived() -> None:
            source.memory.unprotect(session_id)
            self._decode(round_, first_token_s)

        self._links.move("kv-increment", session_id, source, target, tokens, arrived)

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
            lambda _, now_s: self._last_token(round_, now_s),
            round_.usable_read_tokens(held_tokens),
        )
        request.hand_over(first_token_s)
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
