"""Slices between two decode steps that leave the ITL target alone."""

from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.presets import load_performance_model
from ampd.policies.registry import create
from ampd.types import Parallelism, RunningRound
from tests.ampd.policies import situations
from tests.ampd.policies.routing_lab import PLAIN, round_of

MODEL = load_performance_model("qwen3-32b-h20")
TP4 = Parallelism(4)
CHUNKS = create("slicing", "itl-chunks")


def running(count: int, itl_slo_s: float = 0.04, context_tokens: int = 1000) -> list[RunningRound]:
    return [RunningRound(5, 0.1, itl_slo_s, context_tokens)] * count


def test_the_slice_and_the_step_after_it_fill_the_target() -> None:
    # A step of 5 sequences takes 10 ms; of 40 ms 30 are left, 10 for the pass and 1 for each of 20 tokens.
    assert situations.slice(CHUNKS, round_of(100, 400), running(5), TP4, PLAIN, 0.0) == 20


def test_the_strictest_target_of_the_batch_holds() -> None:
    batch = [*running(4, 0.1), *running(1, 0.05)]
    assert situations.slice(CHUNKS, round_of(0, 500), batch, TP4, PLAIN, 0.0) == 30


def test_alone_it_runs_whole() -> None:
    assert situations.slice(CHUNKS, round_of(100, 400), [], TP4, PLAIN, 0.0) == 400


def test_a_late_batch_still_lets_the_floor_through_and_never_more_than_is_left() -> None:
    late = running(40)
    assert situations.slice(CHUNKS, round_of(0, 500), late, TP4, PLAIN, 0.0) == 16
    assert situations.slice(CHUNKS, round_of(495, 5), late, TP4, PLAIN, 0.0) == 5


@given(st.integers(0, 40_000), st.integers(1, 9000), st.integers(1, 64), st.integers(1, 20_000), st.floats(0.01, 0.2))
def test_it_ends_and_only_the_floor_ever_makes_a_step_late(
    hist: int, incr: int, batch: int, context: int, itl_s: float
) -> None:
    rounds, done = running(batch, itl_s, context), 0
    step_s = MODEL.decode_step_s(batch, batch * context, TP4)
    while done < incr:
        part = situations.slice(CHUNKS, round_of(hist + done, incr - done), rounds, TP4, MODEL, 0.0)
        assert 1 <= part <= incr - done
        stays_within = MODEL.prefill_s(hist + done, part, TP4) <= itl_s - step_s
        assert stays_within or part == min(16, incr - done)
        done += part
