"""Why rounds of a soak failed: what the client got, with the reason in the coordinators' logs."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.faults.load import Ending, RoundResult
from benchmarks.soak.failures import NOT_REFUSED, failures_of, lines, plain, read_refusals

HIDDEN = "Internal server error"


def failed(session_id: str, ended_s: float, detail: str = HIDDEN) -> RoundResult:
    return RoundResult(session_id, ended_s - 1.0, ended_s, ending=Ending.FAILED, detail=detail)


def refusal(session_id: str, at_s: float, error: str) -> str:
    at = datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"time": at, "message": "round refused", "status": 500, "error": error, "session_id": session_id})


def test_the_reason_is_that_of_the_same_session_at_the_same_time(tmp_path: Path) -> None:
    now_s, wall_s = time.monotonic(), time.time()
    log = tmp_path / "coordinator-1.log"
    log.write_text(
        "\n".join(
            [
                "no JSON: round refused",
                refusal("a", wall_s - 100.0, "another round of the session"),
                refusal("a", wall_s, "two workers died under this request; retry after 9 s"),
                refusal("b", wall_s, "another session"),
            ]
        )
    )
    results = [failed("a", now_s), failed("c", now_s), RoundResult("a", now_s, now_s, ending=Ending.COMPLETED)]
    events = [(now_s - 50.0, "earlier"), (now_s - 5.0, "kill-engine"), (now_s + 5.0, "later")]
    found = failures_of(results, read_refusals([log]), events)
    assert found == {
        f"{HIDDEN} (500: two workers died under this request; retry after N s)": {"kill-engine": 1},
        f"{HIDDEN} ({NOT_REFUSED})": {"kill-engine": 1},
    }


def test_rounds_with_one_cause_are_one_line() -> None:
    first = "worker ae87811421b8c6cc hangs for 12.5 s (trace_id 3de72950b443d760bc1a57779d094bb3)"
    second = "worker 62b4dc58e2e8ef50 hangs for 7.25 s (trace_id 80313cf1478151662c64dd1047bfa93a)"
    assert plain(first) == plain(second) == "worker ID hangs for N s (trace_id ID)"
    results = [failed("a", 10.0, first), failed("b", 20.0, second), failed("c", 21.0, "503: away")]
    found = failures_of(results, {}, [(15.0, "kill-engine")])
    cause = f"worker ID hangs for N s (trace_id ID) ({NOT_REFUSED})"
    assert lines(found) == [
        f"Failed 2 times: {cause}. Latest events: no event 1, kill-engine 1",
        f"Failed 1 times: 503: away ({NOT_REFUSED}). Latest events: kill-engine 1",
    ]
