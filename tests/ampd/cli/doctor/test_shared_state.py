"""Redis: a real one, one that is away, one with few rights, and readings of others."""

from dataclasses import replace

import pytest

from ampd.cli.doctor import StateReading, Verdict, judge_state, made, read_state
from ampd.errors import UserError
from tests.harness.tcp_redis import TcpRedis

GOOD = StateReading("redis://state:6379/0", version="7.2.5", policy="noeviction")


def test_a_redis_that_answers_is_read(redis_server: TcpRedis) -> None:
    reading = read_state(redis_server.tcp_url, "ampd")
    assert int(reading.version[0]) >= 6
    assert reading.policy == "noeviction"


def test_an_embedded_redis_is_read() -> None:
    assert read_state("embedded", "ampd").policy == "noeviction"


def test_rights_as_in_the_manifests_are_enough() -> None:
    rights = "on >right resetkeys ~ampd:{ampd}:* resetchannels &ampd:{ampd}:* +@connection +@read +@write +publish"
    users = f"--user ampd {rights} +subscribe +@scripting +time -@admin -@dangerous"
    users += f" --user reader {rights} +subscribe +@scripting +time -@admin -@dangerous -set"
    with TcpRedis(users.split()) as server:
        place = server.tcp_url.removeprefix("redis://")
        reading = read_state(f"redis://ampd:right@{place}", "ampd")
        assert (bool(reading.version), reading.policy) == (True, "")
        assert judge_state(reading).verdict is Verdict.OK
        with pytest.raises(UserError, match="ermission"):
            read_state(f"redis://ampd:right@{place}", "another")
        with pytest.raises(UserError, match="'set'"):
            read_state(f"redis://reader:right@{place}", "ampd")
        with pytest.raises(UserError) as wrong:
            read_state(f"redis://ampd:hunter2@{place}", "ampd")
    assert "hunter2" not in str(wrong.value)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "http://127.0.0.1"])
def test_what_is_no_redis_is_wrong(url: str) -> None:
    finding = made("Redis", lambda: judge_state(read_state(url, "ampd")))
    assert finding.verdict is Verdict.WRONG
    assert finding.found.startswith(("shared state redis://127.0.0.1:1/0: ", "state URL: it is malformed"))
    assert finding.fix.startswith("start Redis there, or correct --state-url")


@pytest.mark.parametrize(
    ("reading", "verdict", "fix"),
    [
        (GOOD, Verdict.OK, ""),
        (replace(GOOD, policy=""), Verdict.OK, ""),
        (replace(GOOD, policy="allkeys-lru"), Verdict.WARNING, "noeviction"),
        (replace(GOOD, version="6.0.16"), Verdict.WRONG, "6.2"),
        (replace(GOOD, version="10.0.1"), Verdict.OK, ""),
    ],
)
def test_readings_of_other_servers(reading: StateReading, verdict: Verdict, fix: str) -> None:
    finding = judge_state(reading)
    assert finding.verdict is verdict
    assert fix in finding.fix
