"""The rivals' routings in a simulated cluster, with the bindings, slices and pools that go with them."""

from __future__ import annotations

from dataclasses import replace

from ampd.policies.registry import create, create_named
from planner.simulator.options import Cluster, Policies, SimulationOptions
from planner.simulator.outcome import SimulationRun
from workloads.trace import Session

from .lab import REMOTE, SLO, RandomPools, run, session, single

ROUTINGS = ("always-remote(choice=random)", "arrow", "deflection", "first-remote", "threshold(tokens=300)")
POOLS = {"static": create("pools", "static"), "arrow": create("pools", "arrow", cooldown_s=0.0), "dice": RandomPools()}


def by(routing: str, slicing: str = "itl-chunks", pools: str = "static", binding: str = "least-kv") -> Policies:
    return replace(
        REMOTE,
        binding=create_named("binding", binding),
        routing=create_named("routing", routing),
        slicing=create_named("slicing", slicing),
        pools=POOLS[pools],
    )


def longest_gap_s(done: SimulationRun) -> float:
    """Of those who were in the batch before; who has just joined waited for its KV."""
    return max(gap.first_s + (gap.steps - 1) * max(gap.growth_s, 0.0) for gap in done.gaps if gap.batch > 1)


def test_the_first_round_leaves_and_the_later_ones_stay() -> None:
    done = run([session("a", (900, 5), (40, 5), (700, 5))], single(), by("first-remote"))
    assert [record.reason for record in done.rounds] == ["first-round", "later-round", "later-round"]
    assert [record.route for record in done.rounds] == ["remote", "local", "local"]


def test_the_threshold_looks_at_what_is_new_on_the_decode_worker() -> None:
    done = run([session("a", (900, 5), (40, 5), (700, 5))], single(), by("threshold(tokens=300)"))
    assert [record.route for record in done.rounds] == ["remote", "local", "remote"]


def crowd() -> list[Session]:
    """A few that decode for long, then more prompts than the prefill worker can take at once."""
    talkers = [session(f"t{number}", (200, 400), arrival_s=0.3 * number) for number in range(4)]
    return [*talkers, *(session(f"p{number}", (2000, 2), arrival_s=2.0 + 0.02 * number) for number in range(12))]


def test_deflected_prefills_leave_the_batch_its_target_and_shorten_the_first_token() -> None:
    # A hand-over in a pass of its own would come on top of a slice now and then.
    how = SimulationOptions(hand_over_pass=False)
    deflected, whole = (run(crowd(), single(), by("deflection", slicing), how) for slicing in ("itl-chunks", "whole"))
    remote = run(crowd(), single(), by("always-remote"), how)
    assert 0 < sum(record.route == "local" for record in deflected.rounds if record.session_id[0] == "p") < 12
    assert longest_gap_s(deflected) <= SLO.itl_s
    assert longest_gap_s(whole) > SLO.itl_s * 2
    assert worst_ttft_s(deflected) < worst_ttft_s(remote)


def worst_ttft_s(done: SimulationRun) -> float:
    return max(record.ttft_s or 0.0 for record in done.rounds)


def test_arrow_turns_a_decode_worker_and_sends_it_prefills_while_it_still_decodes() -> None:
    talkers = [session(f"t{number}", (200, 900), arrival_s=0.1 * number) for number in range(4)]
    burst = [session(f"p{number}", (3000, 2), arrival_s=2.0 + 0.01 * number) for number in range(30)]
    cluster = Cluster(single().decode + single().decode, single().prefill)
    done = run([*talkers, *burst], cluster, by("arrow", pools="arrow", binding="arrow"))
    used = {record.reason: record.worker_id for record in done.rounds if record.session_id[0] == "p"}
    assert used.keys() == {"prefill", "decode-to-prefill", "least-delay"}
    assert used["prefill"] == "prefill-0"
    assert used["decode-to-prefill"].startswith("decode")
    static = run([*talkers, *burst], cluster, by("arrow", binding="arrow"))
    assert worst_ttft_s(done) < worst_ttft_s(static)
