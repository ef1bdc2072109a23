"""Expected lengths of outputs, of which some still grow."""

from planner.look_ahead.recorded import OutputLengths


def test_with_ended_outputs_only_it_is_their_mean() -> None:
    assert OutputLengths([10, 20, 60], []).expected() == 30


def test_outputs_that_still_grow_raise_the_expectation() -> None:
    """Two of four ended early. The mean of these would be 20."""
    lengths = OutputLengths([20, 20], [200, 200])
    assert lengths.expected() == round(20 + 0.5 * 180 + 0.5 * 200)
    assert lengths.expected(50) == 50 + 150 + 200


def test_an_output_that_is_long_already_gets_what_longer_ones_had() -> None:
    assert OutputLengths([10, 10, 100, 200], []).expected(50) == 150


def test_behind_the_longest_one_it_doubles() -> None:
    assert OutputLengths([10], []).expected(40) == 80
    assert OutputLengths([], []).expected() == 1


def test_an_expectation_is_longer_than_what_is_there() -> None:
    for tokens in range(1, 30):
        assert OutputLengths([5, 9, 9, 30], [2, 12]).expected(tokens) > tokens
