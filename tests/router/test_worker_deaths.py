import pytest

from router import worker_deaths
from router.round_errors import RoundRefusedError
from router.worker_deaths import MEMORY_S, WorkerDeaths


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_request_is_known_by_its_id_and_by_its_prompt() -> None:
    deaths = WorkerDeaths(Clock())
    deaths.of_request("a", b"prompt").add("w1")
    deaths.of_request("a", b"prompt").check()
    deaths.of_request("a", b"prompt").add("w1")  # the same worker
    with pytest.raises(RoundRefusedError, match="2 workers died"):
        deaths.of_request("a", b"longer prompt").add("w2")
    with pytest.raises(RoundRefusedError, match="2 workers died"):
        deaths.of_request("b", b"prompt").add("w3")
    deaths.of_request("c", b"another").check()


def test_deaths_are_forgotten_with_time_and_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_deaths, "_MAX_REMEMBERED", 4)
    clock = Clock()
    deaths = WorkerDeaths(clock)
    for number in range(10):
        deaths.of_request(f"id{number}", b"%d" % number).add("w1")
    assert len(deaths) == 4
    clock.now_s = MEMORY_S
    deaths.of_request("id9", b"9").add("w2")
    assert len(deaths) == 2


def test_who_is_served_is_not_to_blame() -> None:
    deaths = WorkerDeaths(Clock())
    request = deaths.of_request("a", b"prompt")
    request.add("w1")
    request.survived()
    request.add("w2")
    assert deaths.count == 2
