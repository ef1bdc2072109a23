"""Redis: a real one, one that is away, one with few rights, and readings of others."""

from dataclasses import replace

import pytest

from ampd.cli.doctor.finding import Verdict
from ampd.cli.doctor.shared_state import StateReading, judge_state, read_state
from tests.harness.tcp_redis import TcpRedis

FAST = StateReading("redis://state:6379/0", version="7.2.5", policy="noeviction", p50_s=0.0002, p99_s=0.001)


def test_a_redis_that_answers_is_measured(redis_server: TcpRedis) -> None:
    reading = read_state(redis_server.tcp_url, "ampd")
    assert reading.problem == ""
    assert int(reading.version[0]) >= 6
    assert reading.policy == "noeviction"
    assert 0 < reading.p50_s <= reading.p99_s


def test_an_embedded_redis_is_measured() -> None:
    assert read_state("embedded", "ampd").problem == ""


def test_rights_as_in_the_manifests_are_enough() -> None:
    rights = "on >right resetkeys ~ampd:{ampd}:* resetchannels &ampd:{ampd}:* +@connection +@read +@write +publish"
    user = f"--user ampd {rights} +subscribe +@scripting +time -@admin -@dangerous"
    with TcpRedis(user.split()) as server:
        place = server.tcp_url.removeprefix("redis://")
        reading = read_state(f"redis://ampd:right@{place}", "ampd")
        assert (reading.problem, reading.policy) == ("", "")
        assert reading.version
        assert judge_state(reading)[0].verdict is not Verdict.WRONG
        refused = read_state(f"redis://ampd:right@{place}", "another")
        assert "ermission" in refused.problem
        wrong = read_state(f"redis://ampd:hunter2@{place}", "ampd")
    (finding,) = judge_state(wrong)
    assert finding.verdict is Verdict.WRONG
    assert "hunter2" not in f"{wrong}{finding}"


def test_a_redis_that_is_away_is_wrong() -> None:
    (finding,) = judge_state(read_state("redis://127.0.0.1:1/0", "ampd"))
    assert finding.verdict is Verdict.WRONG
    assert "--state-url" in finding.fix


def test_a_malformed_url_is_wrong() -> None:
    assert judge_state(read_state("http://127.0.0.1", "ampd"))[0].verdict is Verdict.WRONG


@pytest.mark.parametrize(
    ("reading", "verdict", "fix"),
    [
        (FAST, Verdict.OK, ""),
        (replace(FAST, policy=""), Verdict.OK, ""),
        (replace(FAST, policy="allkeys-lru"), Verdict.SLOW, "noeviction"),
        (replace(FAST, p99_s=0.05), Verdict.SLOW, "nearer"),
        (replace(FAST, version="6.0.16"), Verdict.WRONG, "6.2"),
        (replace(FAST, version="10.0.1"), Verdict.OK, ""),
    ],
)
def test_readings_of_other_servers(reading: StateReading, verdict: Verdict, fix: str) -> None:
    (finding,) = judge_state(reading)
    assert finding.verdict is verdict
    assert fix in finding.fix
