"""Reports of workers: a malformed one changes no decision, and the round goes on."""

from typing import Any

import pytest

from ampd.types import Role
from router.worker_reports import WorkerReports, parse_report
from tests.router.replica_lab import Replica, cluster, worker

REPORT = {
    **dict.fromkeys(("held_tokens", "cached_tokens", "kv_read_tokens", "kv_read_bytes"), 5),
    **dict.fromkeys(("queued_s", "prefill_s", "kv_read_s"), 0.5),
    "hit_tokens": {"device": 3},
}


def test_a_report_is_taken_without_unknown_keys() -> None:
    assert parse_report({**REPORT, "of_a_newer_worker": [1]}) == REPORT


@pytest.mark.parametrize(
    "wrong",
    [
        {"held_tokens": -1},
        {"prefill_s": float("nan")},
        {"prefill_s": 10**400},
        {"queued_s": "soon"},
        {"hit_tokens": {"device": -3}},
        {"decode_batch": 1},
        {"cached_tokens": True},
    ],
)
def test_a_malformed_report_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        parse_report({**REPORT, **wrong})
    with pytest.raises(ValueError, match="missing required field `held_tokens`"):
        parse_report({name: value for name, value in REPORT.items() if name != "held_tokens"})


def test_malformed_reports_are_logged_once_per_worker(caplog: pytest.LogCaptureFixture) -> None:
    reports = WorkerReports()
    for worker_id in ("w1", "w2", "w1", "w1"):
        assert reports.of({"ampd": {"held_tokens": -1}}, worker_id) is None
    assert reports.of({"ampd": REPORT}, "w1") == REPORT
    assert reports.of({}, "w3") is None
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["w1", "w2"]


@pytest.mark.parametrize("wrong", [{"held_tokens": -5}, {"decode_batch": "many", "decode_context_tokens": 0}])
@pytest.mark.parametrize("routing", ["always-remote", "always-local"])
async def test_a_round_completes_and_the_view_stays_as_it_was(routing: str, wrong: dict[str, Any]) -> None:
    before = worker("d1", decode_batch=2)
    async with Replica(await cluster(before, worker("p1", Role.PREFILL)), routing) as replica:
        replica.workers.batch = wrong
        tokens, record = await replica.round()
        assert len(tokens) == 5
        assert record["retries"] == 0
        assert replica.view.decode() == (before,)
