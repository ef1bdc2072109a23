"""When an outlook is better than another one."""

from dataclasses import replace

from planner.look_ahead.comparison import Outlook, Replay


def replay(count: int) -> Replay:
    return Replay(frozenset(("s", number) for number in range(count)), count / 100)


def test_one_better_replay_is_enough_if_the_other_is_not_worse() -> None:
    now = Outlook(replay(80), replay(80))
    assert Outlook(replay(90), replay(80)).is_better_than(now, 0.02)
    assert Outlook(replay(79), replay(90)).is_better_than(now, 0.02)
    assert not Outlook(replay(81), replay(81)).is_better_than(now, 0.02)


def test_a_gain_of_less_than_three_deviations_may_be_chance() -> None:
    """Eight rounds won and none lost are 2.8 standard deviations, nine are 3."""
    now = Outlook(replay(80), replay(80))
    for count, is_better in ((88, False), (89, True)):
        assert Outlook(replay(count), replay(80)).is_better_than(now, 0.02) is is_better
        assert Outlook(replay(80), replay(count)).is_better_than(now, 0.02) is is_better


def test_a_change_that_a_rule_of_thumb_wants_too_needs_less_proof() -> None:
    """Four rounds won and none lost are two standard deviations."""
    now = Outlook(replay(80), replay(80))
    for count, is_better in ((83, False), (84, True)):
        assert not Outlook(replay(80), replay(count)).is_better_than(now, 0.02)
        assert Outlook(replay(80), replay(count)).is_better_than(now, 0.02, is_supported=True) is is_better
        assert Outlook(replay(count), replay(80)).is_better_than(now, 0.02, is_supported=True) is is_better


def test_roles_that_are_worse_soon_need_no_longer_record() -> None:
    now, worse = Outlook(replay(80), replay(80)), Outlook(replay(60), None)
    assert worse.share == worse.worst == 0.6
    assert not worse.is_better_than(now, 0.02)
    assert now.is_better_than(worse, 0.02)
    assert not worse.gains(now, 0.02)


def test_a_loss_later_keeps_the_roles_unless_many_more_rounds_gain_soon() -> None:
    """Five rounds fewer later are outweighed by 20 rounds more soon, and not by 19."""
    now = Outlook(replay(80), replay(80))
    assert not Outlook(replay(99), replay(75)).is_better_than(now, 0.02)
    assert Outlook(replay(100), replay(75)).is_better_than(now, 0.02)


def test_a_loss_soon_outweighs_any_gain_later() -> None:
    now = Outlook(replay(80), replay(80))
    torn = Outlook(replay(75), replay(100))
    assert not torn.is_better_than(now, 0.02)
    assert torn.gains(now, 0.02)


def test_a_sign_of_a_loss_is_enough_to_stay_and_a_sign_of_a_gain_is_not_enough_to_change() -> None:
    """Three rounds are 1.7 standard deviations."""
    now = Outlook(replay(80), replay(80))
    assert not Outlook(replay(77), replay(95)).is_better_than(now, 0.02)
    assert not Outlook(replay(91), replay(77)).is_better_than(now, 0.02)
    assert not Outlook(replay(83), replay(83)).is_better_than(now, 0.02)


def test_what_is_proven_has_to_be_beaten() -> None:
    proven = Outlook(replay(75), replace(replay(40), proven=0.8))
    assert not Outlook(replay(75), replay(75)).is_better_than(proven, 0.02)
    assert not Outlook(replay(75), replay(75)).gains(proven, 0.02)
    assert Outlook(replay(75), replay(83)).is_better_than(proven, 0.02)
    assert proven.worst == 0.75
    assert Outlook(replay(90), proven.later).worst == 0.8


def test_the_rounds_of_both_replays_count_together() -> None:
    """Four rounds are two standard deviations, and three are 1.7."""
    now = Outlook(replay(80), replay(80))
    assert not now.surely_meets_more_than(now)
    assert Outlook(replay(82), replay(82)).surely_meets_more_than(now)
    assert not Outlook(replay(82), replay(81)).surely_meets_more_than(now)
    assert not Outlook(replay(78), replay(82)).surely_meets_more_than(now)
    assert Outlook(replay(84), None).surely_meets_more_than(now)
