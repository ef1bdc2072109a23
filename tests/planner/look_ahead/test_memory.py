"""The KV memory that sessions need now and soon."""

from dataclasses import replace

from ampd.recent_load import RecentRound
from ampd.types import PrefillTask, Role, Slo, WorkerView
from planner.look_ahead.pools import sessions_share, will_be_short

from .lab import question

NOW_S = 400.0


def owners(*held: dict[str, int]) -> list[WorkerView]:
    return [
        WorkerView(f"d{number}", Role.DECODE, kv_capacity_tokens=100_000, held_tokens=tokens)
        for number, tokens in enumerate(held)
    ]


def short(load: dict[str, list[RecentRound]], held: dict[str, int]) -> bool:
    return will_be_short(question(owners(held), load, now_s=NOW_S), owners(held), 0.8)


def at(sent_s: float, prompt_tokens: int) -> RecentRound:
    return RecentRound(sent_s, 0, prompt_tokens, sent_s + 1.0, 0, is_met=True)


OLD = {"old": [at(120.0, 30_000)]}


def test_a_session_counts_once_and_copies_do_not() -> None:
    views = owners({"a": 40_000, "b": 10_000}, {"a": 30_000})
    assert sessions_share(views, views) == 0.25
    assert sessions_share(views, views[:1]) == 0.5
    assert sessions_share([WorkerView("d", Role.DECODE, held_tokens={"a": 5})], [WorkerView("d", Role.DECODE)]) == 0.0


def test_kv_that_grows_as_before_will_be_short() -> None:
    grown = {"old": [*OLD["old"], at(390.0, 56_000)]}
    assert short(grown, {"old": 56_000})
    assert not short(grown, {"old": 52_000})
    assert short(OLD | {"new": [at(300.0, 26_000)]}, {"old": 30_000, "new": 26_000})


def test_kv_that_stays_or_takes_the_place_of_ended_sessions_will_not() -> None:
    assert not short(OLD, {"old": 30_000, "idle": 40_000})
    ended = {"ended": [at(130.0, 26_000), at(280.0, 26_000)], "new": [at(300.0, 26_000)]}
    assert not short(OLD | ended, {"old": 30_000, "new": 26_000})


def test_a_cluster_that_has_just_started_fills_up_anyhow() -> None:
    young = {"old": [at(350.0, 1_000), at(390.0, 56_000)]}
    assert not short(young, {"old": 56_000})
    assert short(young | {"first": [at(330.0, 10)]}, {"old": 56_000, "first": 10})
    filled = {"old": [at(300.0, 50_000), at(390.0, 56_000)]}
    assert not short(filled, {"old": 56_000}), "it filled up in the first half of the record"


def test_a_short_record_tells_of_the_growth_per_second() -> None:
    """10,000 tokens in the last 50 s are 30,000 in 150 s."""
    assert short({"old": [at(300.0, 43_000), at(390.0, 53_000)]}, {"old": 53_000})
    assert not short({"old": [at(300.0, 43_000), at(390.0, 51_000)]}, {"old": 51_000})


def test_sessions_that_are_late_in_a_queue_need_prefill_workers_and_not_memory() -> None:
    views = owners({"old": 30_000, "waits": 56_000})
    load = {"old": [at(120.0, 30_000), at(300.0, 30_000)], "waits": [at(120.0, 1_000), at(300.0, 56_000)]}
    task = PrefillTask("t", "waits", 56_000, 10, NOW_S - 2.0, Slo(5.0, 0.05))
    for ttft_s, is_short in ((5.0, True), (1.0, False)):
        queued = [*views, WorkerView("p", Role.PREFILL, queue=(replace(task, slo=Slo(ttft_s, 0.05)),))]
        assert will_be_short(question(queued, load, now_s=NOW_S), views, 0.8) is is_short
