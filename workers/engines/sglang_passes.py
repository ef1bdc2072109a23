"""The passes of SGLang's scheduler: how much each one prefills, and whether it is a step of the decode batch too.

SGLang cuts prefills into chunks of one configured size, and each of its chunks is a step too where it mixes.
`defer_prefill` and `sized_prefill` wrap two methods of its scheduler, so that the slicing policy chooses the size of
each chunk instead, or a step of the batch alone, and predicted times whether the chunk is a step.

SGLang itself does not mix where the prefill or the batch wants log-probabilities, or where KV memory has no room for
the batch's tokens. Then the batch pauses for a chunk of the size that the policy chose. The policy counts on one
reading of the weights for both, so the pause is longer than it means by one more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, lcm
from typing import Any

from msgspec import json

from ampd.perf.corrections import CorrectedModel
from ampd.perf.presets import load_performance_model
from ampd.policies.registry import SLICING
from ampd.serving.pass_sizes import PassSizes, full_pages, is_taken_over
from ampd.types import Parallelism, PrefillTask, Role, RunningRound
from workers.engines.base import EngineRequest
from workers.unfailing import UnfailingSlicing

_OWN = -1
"""Instead of a number of tokens: the chunk that SGLang is configured with."""

_KEY = "ampd_request"


# -- what the scheduler knows of a request


@dataclass(slots=True)
class Known:
    """What the scheduler knows of one request.

    Attributes:
        task: what was left of its prefill when the worker sent it; None: a request without targets.
        is_handed_over: its first token came elsewhere.
        first_s: when its first token came; None: it has not.
        tells: the worker wants to know of its passes.
    """

    task: PrefillTask | None = None
    is_handed_over: bool = False
    first_s: float | None = None
    tells: bool = False


def pass_params(request: EngineRequest, *, tells: bool = True) -> dict[str, Any]:
    """The sampling parameters that bring the scheduler what it must know of a request; none without targets.

    They are `custom_params`, whose text SGLang passes on as it is. Nothing else reads them, because no request of ours
    has a logit processor of its own.

    Args:
        tells: whether the worker wants to know of the request's passes, if anyone does.
    """
    if request.task is None:
        return {}
    is_handed_over, tells = request.first_s is not None, tells and request.on_pass is not None
    return {"custom_params": {_KEY: json.encode(Known(request.task, is_handed_over, request.first_s, tells)).decode()}}


def known(request: Any) -> Known:
    """What is known of a request of SGLang. It is kept with the request, because every pass asks again."""
    found: Known | None = getattr(request, "ampd_known", None)
    if found is None:
        text = (request.sampling_params.custom_params or {}).get(_KEY)
        found = request.ampd_known = Known() if text is None else json.decode(text, type=Known)
    return found


# -- hooks in SGLang's scheduler


def defer_prefill(original: Callable[..., bool], scheduler: Any, running_batch: Any) -> bool:
    """Around `Scheduler._should_defer_prefill`, which says that the next pass is a step of the batch alone."""
    if original(scheduler, running_batch):
        return True
    if not scheduler.is_mixed_chunk or passes_of(scheduler).choose(running_batch.reqs).tokens:
        return False
    passes_of(scheduler).has_paused = False
    return True


def sized_prefill(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    """Around `Scheduler.get_new_batch_prefill`, which makes the batch of the next pass, if it prefills."""
    if not scheduler.is_mixed_chunk:
        return original(scheduler, running_batch)
    passes, is_beside = passes_of(scheduler), bool(running_batch.reqs)
    own_tokens = scheduler.chunked_prefill_size
    if passes.next.tokens != _OWN:
        scheduler.chunked_prefill_size = passes.next.tokens
    scheduler.is_mixed_chunk = passes.next.is_mixed
    try:
        plan = original(scheduler, running_batch)
    finally:
        # It also says how much memory a new request may need.
        scheduler.chunked_prefill_size = own_tokens
        scheduler.is_mixed_chunk = True
    batch = plan.batch_to_run
    passes.has_paused = is_beside and batch is not None and not batch.decoding_reqs
    if told := begun_passes(batch, scheduler.chunked_req, is_beside=is_beside):
        passes.linker.tell_passes(told)
    return plan


def passes_of(scheduler: Any) -> SchedulerPasses:
    found: SchedulerPasses | None = getattr(scheduler, "ampd_passes", None)
    if found is None:
        found = scheduler.ampd_passes = SchedulerPasses(scheduler)
    return found


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next pass in SGLang's terms.

    Attributes:
        tokens: where the pass is mixed, the rows of the batch are part of it; 0: a step of the batch alone.
    """

    tokens: int
    is_mixed: bool


class SchedulerPasses:
    """Chooses the passes of one rank's scheduler. Rank 0 asks the policy, because the clocks of ranks differ.

    Attributes:
        linker: the rank's `KvLinker`; None: an engine without AMPD's exchange of KV.
        next: the next pass.
        has_paused: the batch has paused for the pass before.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._own_tokens: int = scheduler.chunked_prefill_size
        linker = scheduler.tree_cache.linker
        self.linker = linker and linker.cache_linker
        self.next = _SGLANG_OWN
        self.has_paused = False

    def choose(self, running: Sequence[Any]) -> Chunk:
        """Choose the next pass.

        Args:
            running: the requests of the batch.
        """
        now_s = time.monotonic()
        note_first_tokens(running, now_s)
        self.next = _SGLANG_OWN
        scheduler = self._scheduler
        # Those whose grammar is not ready yet may become ready for this very pass.
        waiting = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
        # This is equal on all ranks, and so is the queue.
        if self.linker.passes is not None and running and (waiting or scheduler.chunked_req is not None):
            self.next = self._agreed(lambda: self._chosen(scheduler.chunked_req, waiting, running, now_s))
        return self.next

    def _agreed(self, choose: Callable[[], Chunk]) -> Chunk:
        """What rank 0 chooses."""
        group = self._scheduler.tp_group
        if group.world_size == 1:
            return choose()
        import torch

        mine = choose() if group.rank_in_group == 0 else _SGLANG_OWN
        chosen = torch.tensor([mine.tokens, mine.is_mixed])
        torch.distributed.broadcast(chosen, src=group.ranks[0], group=group.cpu_group)
        return Chunk(int(chosen[0]), bool(chosen[1]))

    def _chosen(self, chunked: Any, waiting: Sequence[Any], running: Sequence[Any], now_s: float) -> Chunk:
        prefills = Prefills.of(chunked, waiting, self._page_tokens)
        return next_chunk(
            prefills,
            running,
            self._sizes,
            now_s,
            page_tokens=self._page_tokens,
            most_tokens=self._own_tokens,
            has_paused=self.has_paused,
        )

    @property
    def _page_tokens(self) -> int:
        return int(self._scheduler.page_size)

    @cached_property
    def times(self) -> CorrectedModel | None:
        """The times of this engine; None: nobody wants to know them, or another rank measures them."""
        if self.linker is None or self.linker.passes is None or self._scheduler.tp_group.rank_in_group:
            return None
        parallelism = Parallelism(tp=self._scheduler.tp_group.world_size)
        backend = attention_backend(self._scheduler.server_args)
        return CorrectedModel(load_performance_model(self.linker.passes["perf"], backend), parallelism)

    @cached_property
    def _sizes(self) -> PassSizes:
        assert self.times is not None
        slicing = UnfailingSlicing(SLICING.create_named(self.linker.passes["slicing"]))
        role = Role(self.linker.passes["role"])
        return PassSizes(slicing, self.times, self.times.parallelism, self._grain_tokens(), lambda: role)

    def _grain_tokens(self) -> int:
        """Between which tokens prefills are cut."""
        grain = lcm(self._page_tokens, self._scheduler.truncation_align_size or 1)
        if self._scheduler.tree_cache.supports_mamba():
            from sglang.srt.runtime_context import mamba_cache_chunk_size

            # Only there a state is kept.
            grain = lcm(grain, mamba_cache_chunk_size())
        return grain


_SGLANG_OWN = Chunk(_OWN, is_mixed=True)


def attention_backend(server_args: Any) -> str:
    """SGLang's backend for prefills, which computes mixed passes too."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    return str(attention_backends_of(resolved_view(server_args))[0])


# -- what they decide, for any objects with the fields of SGLang's requests and batches


@dataclass(frozen=True, slots=True)
class Prefills:
    """What a scheduler has to prefill.

    Attributes:
        oldest: what is left of the prefill that SGLang has begun, or else of the one that came first; None: it has no
            targets, or there is none.
        left_tokens: of each prefill.
        has_begun: SGLang has begun the first of them.
        handed_over: requests that were prefilled elsewhere and have their KV (`is_taken_over`).
        missing_tokens: of each of these.
    """

    oldest: PrefillTask | None
    left_tokens: list[int]
    has_begun: bool
    handed_over: list[Any]
    missing_tokens: list[int]

    @classmethod
    def of(cls, chunked: Any, waiting: Sequence[Any], page_tokens: int) -> Prefills:
        """What SGLang's queue has.

        Args:
            chunked: SGLang's unfinished request, or None.
            waiting: the other requests, in any order: SGLang sorts its queue by what is left of them.
        """
        begun = [] if chunked is None else [chunked]
        cached = [(request, cached_tokens(request)) for request in waiting]
        lefts = [(chunked, _context_tokens(chunked) - chunked.prefix_len)] if begun else []
        handed: list[tuple[Any, int]] = []
        for request, tokens in cached:
            left = max(_context_tokens(request) - tokens, 1)
            is_over = is_taken_over(known(request).is_handed_over, left, page_tokens)
            (handed if is_over else lefts).append((request, left))
        return cls(
            _oldest(lefts[:1] if begun else lefts),
            [left for _, left in lefts],
            bool(begun),
            [request for request, _ in handed],
            [left for _, left in handed],
        )


def _oldest(lefts: Sequence[tuple[Any, int]]) -> PrefillTask | None:
    """What is left of the oldest of some prefills with their left tokens; None: the first has no targets."""
    if not lefts or known(lefts[0][0]).task is None:
        return None
    tasks = [
        task.with_tokens(_context_tokens(request) - left, left)
        for request, left in lefts
        if (task := known(request).task) is not None
    ]
    return min(tasks, key=lambda task: task.arrival_s)


def cached_tokens(request: Any) -> int:
    """Tokens of a waiting request that need not be computed.

    SGLang looks them up when it makes a batch. Before the first time the worker's own count is what there is.
    """
    task = known(request).task
    return int(request.num_matched_prefix_tokens) or (task.hist_tokens if task else 0)


def next_chunk(
    prefills: Prefills,
    running: Sequence[Any],
    sizes: PassSizes,
    now_s: float,
    *,
    page_tokens: int,
    most_tokens: int,
    has_paused: bool = False,
) -> Chunk:
    """The next pass in SGLang's terms.

    What the policy says does not count the rounds that were handed over. SGLang counts them, and in a mixed pass each
    row of the batch as a token. It takes shorter requests first as far as they fit whole beside a page of the prefill
    that has begun (`shortest-prefill-first`), so handed-over rounds need room for a page each, and that page.

    Args:
        running: the requests of the batch.
        most_tokens: the chunk that SGLang is configured with. Its buffers have that size.
    """
    rounds = running_rounds(running, prefills.handed_over, now_s)
    left_tokens = sum(prefills.left_tokens)
    chosen = sizes.next(
        prefills.oldest, left_tokens, rounds, now_s, handed_over=prefills.missing_tokens, has_paused=has_paused
    )
    tokens = chosen.tokens
    if tokens >= left_tokens:
        tokens = full_pages(prefills.left_tokens, page_tokens)
    if not tokens and prefills.handed_over and prefills.has_begun:
        tokens = page_tokens
    tokens += full_pages(prefills.missing_tokens, page_tokens)
    if not tokens:
        return Chunk(0, is_mixed=False)
    rows = len(running) if chosen.is_mixed else 0
    room = (most_tokens - rows) // page_tokens * page_tokens
    return Chunk(min(tokens, room) + rows, chosen.is_mixed) if room > 0 else Chunk(_OWN, is_mixed=False)


def note_first_tokens(running: Sequence[Any], now_s: float) -> None:
    """Note for each request of the batch when its first token came: when it is first seen with one."""
    for request in running:
        if request.output_ids and (about := known(request)).first_s is None:
            about.first_s = now_s


def running_rounds(running: Sequence[Any], handed_over: Sequence[Any], now_s: float) -> list[RunningRound]:
    """The rounds with a first token, those included that wait for their hand-over pass.

    In the overlapped schedule this is asked when a pass has just begun. Neither its tokens nor its time are counted:
    the rounds are taken as they were before it. Meanwhile each gets a token for the time of the pass. A pass that is
    longer than a round's target uses time that the round has saved, and the next pass counts on that time once more.
    So it may be longer than the policy means.
    """
    # One that gets no further token only wanted its prompt computed, or ends with the pass in progress.
    goes_on = [each for each in running if each.sampling_params.max_new_tokens > len(each.output_ids)]
    return [_round(request, now_s) for request in (*goes_on, *handed_over)]


def _round(request: Any, now_s: float) -> RunningRound:
    about = known(request)
    itl_slo_s = inf if about.task is None else about.task.slo.itl_s
    # A first token that is being computed counts from now.
    tokens = max(len(request.output_ids) + about.is_handed_over, 1)
    elapsed_s = 0.0 if about.first_s is None else now_s - about.first_s
    return RunningRound(tokens, elapsed_s, itl_slo_s, _context_tokens(request))


def _context_tokens(request: Any) -> int:
    return len(request.origin_input_ids) + len(request.output_ids)


def begun_passes(batch: Any, chunked: Any, *, is_beside: bool) -> list[tuple[str, int, bool]]:
    """What the worker wants to know of a pass that begins, as `workers.kv.rank_messages.Passes` says.

    Args:
        batch: of the pass; None: it is a step.
        chunked: SGLang's unfinished request, or None.
        is_beside: there is a decode batch.
    """
    if batch is None:
        return []
    decoding = {id(request) for request in batch.decoding_reqs or ()}
    return [
        (
            request.rid,
            _context_tokens(request) - request.extend_end if request is chunked else 0,
            is_beside and request is not chunked,
        )
        for request in batch.reqs
        if (is_beside or request is chunked) and id(request) not in decoding and known(request).tells
    ]
