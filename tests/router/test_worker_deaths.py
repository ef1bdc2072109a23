import pytest

from ampd.state.store import DeathNews, WorkerDied
from router import worker_deaths
from router.round_errors import RoundRefusedError
from router.worker_deaths import MEMORY_S, SHARED_PAUSE_S, WorkerDeaths


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_request_is_known_by_its_id_and_by_its_prompt() -> None:
    deaths = WorkerDeaths(Clock())
    deaths.of_request("a", b"prompt").add("w1")
    deaths.of_request("a", b"prompt").check()
    deaths.of_request("a", b"prompt").add("w1")  # the same worker
    with pytest.raises(RoundRefusedError, match="workers died 2 times"):
        deaths.of_request("a", b"longer prompt").add("w2")
    with pytest.raises(RoundRefusedError, match="workers died 2 times"):
        deaths.of_request("b", b"prompt").add("w3")
    deaths.of_request("c", b"another").check()


def test_no_tenant_learns_what_another_one_sent() -> None:
    deaths = WorkerDeaths(Clock())
    deaths.of_request("a", b"prompt", "first").add("w1")
    with pytest.raises(RoundRefusedError):
        deaths.of_request("a", b"prompt", "first").add("w2")
    with pytest.raises(RoundRefusedError):
        deaths.of_request("b", b"prompt", "first").check()
    deaths.of_request("b", b"prompt", "second").check()


def test_an_engine_that_starts_again_and_dies_again_counts_twice() -> None:
    deaths = WorkerDeaths(Clock())
    deaths.of_request("a", b"prompt").add("w1", 1)
    again = deaths.of_request("b", b"prompt")
    again.add("w1", 1)  # of the same death, from another round
    with pytest.raises(RoundRefusedError, match="workers died 2 times"):
        again.add("w1", 2)
    with pytest.raises(RoundRefusedError, match="it is not tried again"):
        deaths.of_request("c", b"prompt").check()


def test_an_echo_of_a_death_counts_once_and_the_next_start_again() -> None:
    deaths = WorkerDeaths(Clock())
    names = ("id a", "prompt a")
    for _ in range(2):
        deaths.announced(WorkerDied("w1", names, 1))
    assert deaths.most(names) == 1
    deaths.announced(WorkerDied("w1", names, 2))
    assert deaths.most(names) == 2


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


def kill_two(deaths: WorkerDeaths, *prompts: bytes) -> None:
    """The rounds run on two workers, one after the other, and both die."""
    for prompt in prompts:
        request = deaths.of_request(f"id of {prompt.decode()}", prompt)
        request.add("w1")
        with pytest.raises(RoundRefusedError, match="workers died 2 times"):
            request.add("w2")


def test_requests_that_share_their_deaths_are_tried_again_after_a_pause() -> None:
    clock = Clock()
    deaths = WorkerDeaths(clock)
    kill_two(deaths, b"deadly", b"innocent")
    with pytest.raises(RoundRefusedError, match=r"this request and others; retry after 10 s") as refused:
        deaths.of_request("sent again", b"innocent").check()
    assert refused.value.status == 503
    with pytest.raises(RoundRefusedError, match="it is not tried again"):
        deaths.of_request("id of innocent", b"innocent").check()  # the same request, not a new one
    clock.now_s = SHARED_PAUSE_S
    innocent = deaths.of_request("sent again", b"innocent")
    innocent.check()
    innocent.survived()
    with pytest.raises(RoundRefusedError, match="it is not tried again"):
        deaths.of_request("sent again", b"deadly").check()  # it is left alone


def test_a_request_that_ends_a_third_worker_is_left_alone_with_it() -> None:
    clock = Clock()
    deaths = WorkerDeaths(clock)
    kill_two(deaths, b"deadly", b"innocent")
    clock.now_s = SHARED_PAUSE_S
    deadly = deaths.of_request("sent again", b"deadly")
    deadly.check()
    with pytest.raises(RoundRefusedError, match="workers died 3 times"):
        deadly.add("w3")
    # The innocent one has lost fewer workers, so that the deadly one is left alone with its third death.
    clock.now_s += SHARED_PAUSE_S
    with pytest.raises(RoundRefusedError, match="it is not tried again"):
        deaths.of_request("once more", b"deadly").check()
    deaths.of_request("once more", b"innocent").check()


def test_each_further_shared_death_doubles_the_pause() -> None:
    clock = Clock()
    deaths = WorkerDeaths(clock)
    kill_two(deaths, b"deadly", b"innocent")
    clock.now_s = SHARED_PAUSE_S
    for prompt in (b"deadly", b"innocent"):
        with pytest.raises(RoundRefusedError, match="workers died 3 times"):
            deaths.of_request(f"{prompt.decode()} again", prompt).add("w3")
    clock.now_s += 2 * SHARED_PAUSE_S - 1
    with pytest.raises(RoundRefusedError, match="retry after 1 s"):
        deaths.of_request("once more", b"innocent").check()
    clock.now_s += 1
    deaths.of_request("once more", b"innocent").check()


def test_a_request_that_another_coordinator_serves_is_innocent_everywhere() -> None:
    coordinators: list[WorkerDeaths] = []

    def tell(news: DeathNews) -> None:
        for each in coordinators:
            each.announced(news)

    coordinators += [WorkerDeaths(Clock(), tell) for _ in range(2)]
    first, second = (each.of_request("r", b"prompt") for each in coordinators)
    first.add("w1")
    assert [len(each) for each in coordinators] == [2, 2]
    second.survived()
    assert [len(each) for each in coordinators] == [0, 0]
    second.survived()


def test_a_death_under_many_rounds_of_another_coordinator_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    deaths = WorkerDeaths(Clock())
    for worker in ("w1", "w2"):
        for number in range(5):
            deaths.announced(WorkerDied(worker, (f"id {number}", f"prompt {number}")))
    assert [record.getMessage().split()[1] for record in caplog.records] == ["w1", "w2"]
    assert deaths.most(("id 3",)) == 2
