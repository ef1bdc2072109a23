"""Our ordering: exact examples of every rule, and one machine with arrivals, slices and passes against the others."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ampd.perf.model import PerformanceModel, joined_tokens
from ampd.perf.presets import load_performance_model
from ampd.policies.base import OrderingPolicy, Pick, Run
from ampd.policies.estimates import as_job, shortest_pass_s
from ampd.policies.moore_hodgson import keep
from ampd.policies.ordering.on_time import OnTimeOrdering
from ampd.policies.registry import create_named
from ampd.types import Parallelism, PrefillTask, Slo
from tests.ampd.policies import situations
from tests.ampd.policies.ordering.test_ampd import MODEL as TICKS
from tests.ampd.policies.ordering.test_ampd import TICK_S
from tests.ampd.policies.routing_lab import PLAIN

REAL = load_performance_model("qwen3-32b-h20")
TP1, TP4 = Parallelism(1), Parallelism(4)
EXACT = situations.with_constants(OnTimeOrdering(), TOGETHER_PASSES=0.0, AGAIN_TARGETS=1.0)
"""Without passes of several, and without a second due time."""
untimed = settings(deadline=None)


def task(number: int, incr: int, ttft_s: float, arrival_s: float = 0.0, missed: bool = False) -> PrefillTask:
    return PrefillTask(f"t{number}", f"s{number}", 0, incr, arrival_s, Slo(ttft_s, 0.05), session_missed=missed)


def ticks(*rows: tuple[int, int]) -> list[PrefillTask]:
    """Tasks of (ticks to run, ticks until due)."""
    return [task(number, length, due * TICK_S) for number, (length, due) in enumerate(rows)]


class CountingRng(random.Random):
    """Says what it is told, again and again, and counts how often it was asked."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self.value = value
        self.asked = 0

    def random(self) -> float:
        self.asked += 1
        return self.value


def pick(
    queue: Sequence[PrefillTask],
    ordering: OrderingPolicy = EXACT,
    model: PerformanceModel = TICKS,
    now_s: float = 0.0,
    rng: random.Random | None = None,
) -> Pick:
    return situations.pick(ordering, queue, TP1, model, now_s, rng or CountingRng(0.999))


# -- who runs


def test_the_earliest_due_runs_and_overtakes_who_stands_before_it() -> None:
    assert pick(ticks((5, 90), (5, 30), (5, 60))) == Run(1, (0,))


def test_of_equally_due_ones_the_first_runs() -> None:
    assert pick(ticks((5, 30), (5, 30))) == Run(0)


def test_one_that_makes_others_late_is_given_up_for_now() -> None:
    # All three: late. Without the long one the two others are on time.
    assert pick(ticks((20, 20), (8, 22), (8, 24))) == Run(1, (0,))
    # With a tick more it fits in: it is due first.
    assert pick(ticks((8, 20), (6, 22), (8, 24))) == Run(0)


def test_a_hopeless_one_stands_in_nobodys_way_and_runs_when_nothing_else_is_there() -> None:
    hopeless = ticks((31, 30))
    assert pick([*hopeless, *ticks((5, 40))]) == Run(1, (0,))
    assert pick(hopeless) == Run(0)


def test_of_hopeless_ones_the_shortest_runs_and_of_those_the_first() -> None:
    assert pick(ticks((9, 1), (7, 1), (8, 1), (7, 1))) == Run(1, (0,))


def test_a_late_one_is_due_again_with_a_quarter_of_the_weight() -> None:
    again = situations.with_constants(OnTimeOrdering(), TOGETHER_PASSES=0.0)
    late = ticks((31, 30))[0]  # again at 150
    assert pick([late, *ticks((5, 160))], again) == Run(0), "both are on time, and it is due first"
    assert pick([late, *ticks((5, 140))], again) == Run(1, (0,))
    # Only one of them can be in time. The other one is given up if it frees more than four times as much.
    assert pick([late, *ticks((123, 153))], again) == Run(1, (0,))
    assert pick([late, *ticks((125, 155))], again) == Run(0)
    # After 5 targets it is hopeless.
    assert pick([late, *ticks((5, 160))], again, now_s=121 * TICK_S) == Run(1, (0,))


def test_exactly_in_time_is_not_hopeless() -> None:
    assert pick(ticks((31, 31), (5, 60))) == Run(0)


def test_waiting_uses_up_the_target() -> None:
    queue = ticks((10, 30), (10, 40))
    queue[0] = replace(queue[0], arrival_s=-20 * TICK_S)
    assert pick(queue) == Run(0)
    assert pick(queue, now_s=TICK_S) == Run(1, (0,))


def test_a_session_that_has_missed_gives_way_by_its_weight() -> None:
    """Both cannot be on time; the one that is worth half is given up unless it takes less than half the time."""
    for ticks_missed, runs in ((12, 1), (7, 1), (6, 1), (5, 0)):
        queue = [task(0, ticks_missed, 15 * TICK_S, missed=True), task(1, 12, 16 * TICK_S)]
        assert pick(queue).index == runs


# -- the share of the hopeless


def test_the_oldest_hopeless_one_gets_its_share_of_the_picks() -> None:
    queue = ticks((31, 30), (30, 1), (5, 40))
    low, high = CountingRng(0.049), CountingRng(0.05)
    assert pick(queue, rng=low) == Run(0)
    assert pick(queue, rng=high) == Run(2, (0, 1))
    assert (low.asked, high.asked) == (1, 1)
    assert pick(queue, EXACT.model_copy(update={"late_share": 1.0}), rng=high) == Run(0)


def test_dice_are_thrown_only_where_there_is_a_choice() -> None:
    rng = CountingRng(0.0)
    assert pick(ticks((5, 40), (5, 30)), rng=rng) == Run(1, (0,))
    assert pick(ticks((5, 1), (4, 1)), rng=rng) == Run(1, (0,))
    assert pick(ticks((31, 30)), rng=rng) == Run(0)
    assert pick(ticks((31, 30), (5, 40)), EXACT.model_copy(update={"late_share": 0.0}), rng=rng) == Run(1, (0,))
    assert rng.asked == 0


# -- the window


def test_who_stands_behind_the_window_is_not_seen() -> None:
    queue = ticks((5, 90), (5, 80), (5, 30))
    assert pick(queue, situations.with_constants(EXACT, WINDOW=2)).index == 1
    assert pick(queue, situations.with_constants(EXACT, WINDOW=3)).index == 2


@pytest.mark.parametrize("hopeless", [4, 5, 50])
def test_hopeless_ones_do_not_fill_the_window(hopeless: int) -> None:
    """After a burst they pile up at the head, for everybody overtakes them."""
    queue = ticks(*[(9, 1)] * hopeless, (5, 90), (5, 80))
    assert pick(queue, situations.with_constants(EXACT, WINDOW=4)) == Run(hopeless + 1, tuple(range(hopeless + 1)))


def test_behind_hopeless_ones_the_window_is_as_long_as_ever() -> None:
    queue = ticks((9, 1), (5, 90), (9, 1), (5, 80), (5, 30))
    assert pick(queue, situations.with_constants(EXACT, WINDOW=2)).index == 3
    assert pick(queue, situations.with_constants(EXACT, WINDOW=3)).index == 4


# -- passes

PASSES = situations.with_constants(OnTimeOrdering(), TOGETHER_PASSES=2.0, AGAIN_TARGETS=1.0)
"""`PLAIN` takes 10 ms a pass and 1 ms a token, so 26 ms for the shortest: up to 42 tokens run together."""


def plain(*rows: tuple[int, float]) -> list[PrefillTask]:
    return [task(number, incr, ttft_s) for number, (incr, ttft_s) in enumerate(rows)]


def test_short_ones_that_are_due_next_go_along_as_long_as_the_pass_is_short() -> None:
    queue = plain((14, 1.0), (13, 0.9), (15, 0.8), (1, 2.0))
    assert pick(queue, PASSES, PLAIN) == Run(2, (), (1, 0))
    assert pick(plain((14, 1.0), (13, 0.9), (16, 0.8)), PASSES, PLAIN) == Run(2, (0,), (1,))
    # Who goes along is not overtaken.
    for passes, overtaken, together in ((0.0, (0, 1), ()), (1.0, (0, 1), ()), (3.0, (), (1, 0, 3))):
        ordering = situations.with_constants(PASSES, TOGETHER_PASSES=passes)
        assert pick(queue, ordering, PLAIN) == Run(2, overtaken, together)


def test_a_long_one_goes_alone_and_ends_the_pass() -> None:
    assert pick(plain((43, 0.9), (1, 1.0)), PASSES, PLAIN) == Run(0)
    assert pick(plain((1, 0.9), (60, 0.95), (1, 1.0)), PASSES, PLAIN) == Run(0)


def test_company_makes_nobody_late() -> None:
    """Alone the first takes 11 ms; with the others its token comes with the pass."""
    others = ((10, 1.0), (10, 1.0), (10, 1.0))
    assert pick(plain((1, 0.045), *others), PASSES, PLAIN) == Run(0, (), (1, 2, 3))
    assert pick(plain((1, 0.0355), *others), PASSES, PLAIN) == Run(0, (), (1, 2))
    assert pick(plain((1, 0.0115), *others), PASSES, PLAIN) == Run(0)


def test_those_given_up_and_hopeless_ones_do_not_go_along() -> None:
    assert pick(plain((1, 0.9), (1, 0.005), (1, 1.0)), PASSES, PLAIN) == Run(0, (), (2,))
    # 30, 30 and 20 tokens: not all are on time, and of the longest the earliest due is given up.
    assert pick(plain((30, 0.06), (30, 0.07), (20, 0.08)), PASSES, PLAIN).together == ()


def as_one(tasks: Sequence[PrefillTask]) -> PrefillTask:
    """A task that stands for all of a pass."""
    return tasks[0].with_tokens(*joined_tokens([(task.hist_tokens, task.incr_tokens) for task in tasks]))


def test_a_pass_is_as_long_as_all_of_its_members_behind_their_mean_history() -> None:
    assert joined_tokens([(400, 10), (80, 30)]) == (160, 40)
    assert joined_tokens([(400, 10)]) == (400, 10)
    assert joined_tokens([(400, 0), (400, 0)]) == (0, 0)


@untimed
@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 60)), min_size=2, max_size=12), st.integers(0, 3))
def test_a_pass_is_never_longer_than_allowed(rows: list[tuple[int, int]], passes: int) -> None:
    queue = [replace(task(number, incr, 9.0), hist_tokens=hist) for number, (hist, incr) in enumerate(rows)]
    ordering = situations.with_constants(EXACT, TOGETHER_PASSES=float(passes))
    chosen = situations.pick(ordering, queue, TP4, REAL, 0.0, random.Random(0))
    members = [queue[position] for position in (chosen.index, *chosen.together)]
    assert len(set(map(id, members))) == len(members)
    whole = as_one(members)
    if chosen.together:
        limit_s = passes * shortest_pass_s(REAL, members[0].hist_tokens, TP4)
        assert REAL.prefill_s(whole.hist_tokens, whole.incr_tokens, TP4) <= limit_s


# -- any queue

tasks = st.builds(
    lambda incr, hist, waited_s, ttft_s, missed: PrefillTask(
        "t", "s", hist, incr, -waited_s, Slo(ttft_s, 0.05), session_missed=missed
    ),
    st.integers(1, 20_000),
    st.integers(0, 40_000),
    st.floats(0, 5),
    st.floats(0.01, 10),
    st.booleans(),
)
policies = st.builds(
    lambda window, passes, **parameters: situations.with_constants(
        OnTimeOrdering(**parameters), WINDOW=window, TOGETHER_PASSES=passes
    ),
    st.integers(1, 30),
    st.floats(0, 9),
    late_share=st.floats(0, 1),
)


@untimed
@given(st.lists(tasks, min_size=1, max_size=40), policies, st.integers(0, 9))
def test_every_pick_is_valid(queue: list[PrefillTask], ordering: OnTimeOrdering, seed: int) -> None:
    chosen = situations.pick(ordering, queue, TP4, REAL, 0.0, random.Random(seed))
    members = (chosen.index, *chosen.together)
    assert chosen.postponed == tuple(position for position in range(chosen.index) if position not in members)
    assert len(set(members)) == len(members)
    assert all(0 <= position < len(queue) for position in members)
    assert isinstance(chosen, Run)
    assert chosen == situations.pick(ordering, queue, TP4, REAL, 0.0, random.Random(seed))


# -- one machine


class Machine:
    """Serves arrivals one pass at a time; with `quantum_s` a pass ends then, and what is left queues again."""

    def __init__(
        self,
        ordering: OrderingPolicy,
        model: PerformanceModel,
        quantum_s: float = 0.0,
        parallelism: Parallelism = TP4,
    ) -> None:
        self.parallelism = parallelism
        self.ordering = ordering
        self.model = model
        self.quantum_s = quantum_s
        self.rng = random.Random(0)
        self.ended_s: dict[str, float] = {}

    def run(self, arrivals: Sequence[PrefillTask]) -> int:
        """How many were on time."""
        coming = sorted(arrivals, key=lambda arrival: arrival.arrival_s)
        queue: list[PrefillTask] = []
        now_s = 0.0
        while coming or queue:
            if not queue:
                now_s = max(now_s, coming[0].arrival_s)
            while coming and coming[0].arrival_s <= now_s:
                queue.append(coming.pop(0))
            now_s = self._pass(queue, now_s)
        return sum(self.ended_s[arrival.task_id] - arrival.arrival_s <= arrival.slo.ttft_s for arrival in arrivals)

    def _pass(self, queue: list[PrefillTask], now_s: float) -> float:
        chosen = situations.pick(self.ordering, queue, self.parallelism, self.model, now_s, self.rng)
        for position in chosen.postponed:
            queue[position] = replace(queue[position], postponements=queue[position].postponements + 1)
        members = [queue[position] for position in (chosen.index, *chosen.together)]
        whole = as_one(members)
        tokens = whole.incr_tokens
        if len(members) == 1 and self.quantum_s:
            while tokens > 16 and self._s(whole.hist_tokens, tokens) > self.quantum_s:
                tokens = tokens * 3 // 4
        now_s += self._s(whole.hist_tokens, tokens)
        if tokens < whole.incr_tokens:
            left = replace(members[0], hist_tokens=whole.hist_tokens + tokens, incr_tokens=whole.incr_tokens - tokens)
            queue[chosen.index] = left
            return now_s
        for member in members:
            self.ended_s[member.task_id] = now_s
            queue.remove(next(other for other in queue if other.task_id == member.task_id))
        return now_s

    def _s(self, hist_tokens: int, incr_tokens: int) -> float:
        return self.model.prefill_s(hist_tokens, incr_tokens, self.parallelism)


def arrivals(seed: int, load: float, count: int = 120) -> list[PrefillTask]:
    """Agents' rounds: short and long, behind short and long histories, with two targets."""
    dice = random.Random(seed)
    drawn = []
    for number in range(count):
        incr = max(16, int(dice.lognormvariate(6, 1.2)))
        arrival = replace(task(number, incr, dice.choice([0.35, 1.0])), hist_tokens=dice.choice([0, 1000, 15_000]))
        drawn.append(arrival)
    work_s = sum(REAL.prefill_s(arrival.hist_tokens, arrival.incr_tokens, TP4) for arrival in drawn)
    return [replace(arrival, arrival_s=dice.uniform(0, work_s / load)) for arrival in drawn]


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.6, 0.9, 1.2, 2.0])
def test_more_are_on_time_than_with_order_of_arrival_and_algorithm_2(load: float) -> None:
    on_time = {}
    orderings = {name: create_named("ordering", name) for name in ("fcfs", "ampd(window=32)", "edf", "on-time")}
    orderings["one at a time"] = situations.with_constants(OnTimeOrdering(), TOGETHER_PASSES=0.0)
    for name, ordering in orderings.items():
        on_time[name] = sum(Machine(ordering, REAL).run(arrivals(seed, load)) for seed in range(12))
    for name in ("on-time", "one at a time"):
        assert on_time[name] >= on_time["ampd(window=32)"] >= on_time["fcfs"], on_time
        assert on_time[name] >= on_time["edf"], on_time
    if load > 1:
        assert on_time["on-time"] > 1.05 * on_time["ampd(window=32)"], on_time


@pytest.mark.parametrize("load", [0.9, 1.5])
def test_with_slices_too(load: float) -> None:
    on_time = {}
    for name in ("fcfs", "ampd(window=32)", "on-time"):
        ordering = create_named("ordering", name)
        on_time[name] = sum(Machine(ordering, REAL, 0.15).run(arrivals(seed, load)) for seed in range(8))
    assert on_time["on-time"] >= max(on_time.values()), on_time


@untimed
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 400)), min_size=1, max_size=14), st.booleans())
@example([(1, 0), (2, 500), (2, 500)], False)
def test_a_queue_that_can_all_be_on_time_loses_nobody(rows: list[tuple[int, int]], is_ticking: bool) -> None:
    """In passes of several, or cut into slices where that costs nothing."""
    model: PerformanceModel = TICKS if is_ticking else PLAIN
    now_s, queue = 0.0, []
    for number, (incr, spare) in enumerate(rows):
        now_s += model.prefill_s(0, incr, TP1)
        queue.append(task(number, incr, now_s + spare * TICK_S + 1e-9))
    ordering = OnTimeOrdering()
    times_s = [model.prefill_s(0, queued.incr_tokens, TP1) for queued in queue]
    jobs = [as_job(queued, i, times_s[i], 0.0) for i, queued in enumerate(queue)]
    assert keep(jobs)[1] == 0.0
    random.Random(len(rows)).shuffle(queue)

    machine = Machine(ordering, model, 20 * TICK_S if is_ticking else 0.0, TP1)
    assert machine.run(queue) == len(queue)


def test_a_pile_of_hopeless_ones_does_not_make_those_to_come_late() -> None:
    """A burst of twice the window, none of which can be on time, before a load that one machine carries."""
    burst = [replace(task(1000 + number, 2000, 0.01), arrival_s=0.0) for number in range(32)]
    later = arrivals(5, 0.6)
    ordering = situations.with_constants(OnTimeOrdering(), WINDOW=16)
    with_burst = Machine(ordering, REAL).run([*burst, *later])
    alone = Machine(ordering, REAL).run(later)
    assert with_burst >= 0.9 * alone


@pytest.mark.parametrize("quantum_s", [0.0, 0.1])
def test_nobody_starves_below_full_load(quantum_s: float) -> None:
    for seed in range(4):
        coming = arrivals(seed, 0.85, count=250)
        # A twentieth can never be on time.
        coming = [replace(arrival, slo=Slo(1e-4, 0.05)) if i % 20 == 0 else arrival for i, arrival in enumerate(coming)]
        machine = Machine(create_named("ordering", "on-time"), REAL, quantum_s)
        machine.run(coming)
        waits = [machine.ended_s[arrival.task_id] - arrival.arrival_s for arrival in coming]
        assert max(waits) < 30.0, (seed, max(waits))


@pytest.mark.slow
def test_a_hopeless_one_ends_in_an_overload_too_by_its_share_of_the_picks() -> None:
    """A stream that alone fills the machine, each of it on time if nothing else runs."""
    each_s = REAL.prefill_s(0, 1000, TP4)
    stream = [task(number, 1000, 3 * each_s, 0.999 * number * each_s) for number in range(600)]
    late = task(9999, 4000, 1e-4, 0.0)
    ended_s = {}
    for share in (0.05, 0.0):
        machine = Machine(situations.with_constants(OnTimeOrdering(late_share=share), TOGETHER_PASSES=0.0), REAL)
        machine.run([late, *stream])
        ended_s[share] = machine.ended_s[late.task_id]
    assert ended_s[0.05] < 100 * each_s
    assert ended_s[0.0] > 600 * each_s
