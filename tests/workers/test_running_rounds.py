from ampd.types import RunningRound
from workers.slices import RunningRounds


async def test_choices_of_a_round_are_one_round() -> None:
    now_s = 1.0
    rounds = RunningRounds(lambda: now_s)
    for index in (0, 1, 0, 1, 1):
        rounds.add_tokens("r", 0.1, 40, index, 1)
    assert rounds.at(1.5) == (RunningRound(3, 0.5, 0.1, 43),)
    rounds.ended("r")
    rounds.ended("r")
    assert rounds.at(2.0) == ()


def test_a_round_that_was_handed_over_counts_its_first_token() -> None:
    rounds = RunningRounds(lambda: 0.0)
    rounds.handed_over("r", 0.1, 40, 1.0)
    assert rounds.at(1.5) == (RunningRound(1, 0.5, 0.1, 40),)
    rounds.add_tokens("r", 0.1, 40, 0, 2)
    assert rounds.at(2.0) == (RunningRound(3, 1.0, 0.1, 42),)
