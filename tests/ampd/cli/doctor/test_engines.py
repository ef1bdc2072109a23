"""Trials of two engines that went well, badly, or not at all."""

from dataclasses import replace

import pytest

from ampd.cli.doctor.engines import as_modelled, judge_reads, judge_times, judge_tokens, judge_trial
from ampd.cli.doctor.finding import Finding, Verdict
from ampd.cli.doctor.trial import RoundReading, TrialReading
from ampd.perf.presets import load_performance_model
from ampd.types import Parallelism

MODEL = load_performance_model("tiny-cpu")


def _round(route: str, *tokens: int, increment: int = 512, history: int = 512) -> RoundReading:
    record = {"route": route, "kv_read_tokens_increment": increment, "kv_read_tokens_history": history}
    return RoundReading(tokens, record, 0.01)


REMOTE, LOCAL = _round("remote", 1, 2, 3), _round("local", 1, 2, 3)
OTHER = _round("local", 1, 2, 4)


def test_equal_tokens_are_ok() -> None:
    finding = judge_tokens([REMOTE] * 2, [LOCAL] * 2, [LOCAL] * 2)
    assert finding.verdict is Verdict.OK
    assert "KV of 1024 tokens read from the prefill worker" in finding.found


def test_other_tokens_are_wrong() -> None:
    finding = judge_tokens([REMOTE] * 2, [LOCAL, OTHER], [LOCAL, OTHER])
    assert finding.verdict is Verdict.WRONG
    assert "round 2 differs from token 3 on" in finding.found


def test_an_engine_that_does_not_repeat_itself_shows_nothing() -> None:
    assert judge_tokens([REMOTE], [OTHER], [LOCAL]).verdict is Verdict.SKIPPED


@pytest.mark.parametrize(
    ("remote", "local"), [(LOCAL, LOCAL), (REMOTE, REMOTE), (_round("remote", 1, 2, 3, increment=0), LOCAL)]
)
def test_rounds_that_exchanged_nothing_are_wrong(remote: RoundReading, local: RoundReading) -> None:
    assert judge_tokens([remote], [local], [local]).verdict is Verdict.WRONG


def _move(size: int, seconds: float) -> RoundReading:
    return RoundReading((1, 2), {"kv_read_bytes_increment": size, "kv_read_s_increment": seconds}, None)


@pytest.mark.parametrize(
    ("size", "raw", "verdict"),
    [
        (100_000_000, 2.0, Verdict.OK),
        (100_000_000, 20.0, Verdict.SLOW),
        (100_000_000, None, Verdict.OK),
        (1_000_000, 20.0, Verdict.OK),
        (0, 20.0, Verdict.WRONG),
    ],
)
def test_reads_relative_to_nixl_alone(size: int, raw: float | None, verdict: Verdict) -> None:
    assert judge_reads([_move(size, 0.1)], raw).verdict is verdict


def _times(factor: float) -> TrialReading:
    return TrialReading(
        prefills=tuple((tokens, factor * MODEL.prefill_s(0, tokens, Parallelism(tp=1))) for tokens in (256, 1024)),
        steps=((1, 256, factor * MODEL.decode_step_s(1, 256, Parallelism(tp=1))),),
    )


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.OK), (3.0, Verdict.SLOW), (0.3, Verdict.SLOW)])
def test_times_relative_to_a_model(factor: float, verdict: Verdict) -> None:
    finding = judge_times(_times(factor), MODEL, "tiny-cpu", tp=1)
    assert finding.verdict is verdict
    assert f"{factor:.2f} times" in finding.found


def test_times_without_a_model_are_shown() -> None:
    finding = judge_times(_times(1.0), None, "there is none", tp=1)
    assert finding.verdict is Verdict.SKIPPED
    assert "prefill of 256 tokens" in finding.found


def test_a_graph_that_did_not_start_is_one_finding() -> None:
    reading = TrialReading(problem="prefill-0 ended with exit code 1: no memory")
    (finding,) = judge_trial(reading, None, MODEL, "tiny-cpu", tp=1)
    assert finding.verdict is Verdict.WRONG
    assert finding.found == reading.problem


def test_all_parts_of_a_trial_are_judged() -> None:
    reading = replace(_times(1.0), remote=(REMOTE,), local=(LOCAL,), again=(LOCAL,), moves=(_move(1000, 0.1),))
    checks = [finding.check for finding in judge_trial(reading, None, MODEL, "tiny-cpu", tp=1)]
    assert checks == ["equal tokens", "KV reads", "times"]


def test_reads_and_times_of_modelled_engines_are_marked() -> None:
    findings = [Finding(name, Verdict.OK, "found") for name in ("equal tokens", "KV reads", "times", "two engines")]
    marked = [finding.found != "found" for finding in map(as_modelled, findings)]
    assert marked == [False, True, True, False]
