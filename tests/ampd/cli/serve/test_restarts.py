"""A process that ends now and then starts again each time; one that keeps ending is given up."""

from ampd.cli.serve.watch import LASTING_S, MOST, Restarts


def test_a_process_that_ends_at_once_is_given_up_after_longer_and_longer_pauses() -> None:
    restarts, now_s = Restarts(0.0), 1.0
    pauses = []
    while (pause_s := restarts.pause_s(now_s)) is not None:
        pauses.append(pause_s)
        now_s += pause_s + 1.0
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert restarts.pause_s(now_s) is None


def test_a_process_that_lasts_starts_again_for_ever() -> None:
    restarts, now_s = Restarts(0.0), 0.0
    for _ in range(10 * MOST):
        now_s += LASTING_S
        assert restarts.pause_s(now_s) == 0.5
        now_s += 0.5


def test_it_counts_from_its_start_and_not_from_the_end_before() -> None:
    restarts, now_s = Restarts(0.0), 0.0
    for _ in range(MOST):
        now_s += LASTING_S - 0.1  # with the pause, more than LASTING_S after the end before
        pause_s = restarts.pause_s(now_s)
        assert pause_s is not None
        now_s += pause_s
    assert restarts.pause_s(now_s + LASTING_S - 0.1) is None
