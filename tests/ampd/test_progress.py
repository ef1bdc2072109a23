import pytest

from ampd import progress
from ampd.progress import Progress


def test_a_log_gets_a_line_whenever_the_time_between_two_lines_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("rounds", 9) as bar:
        bar.update()
        assert capsys.readouterr().err == "", "less than ten seconds"
        monkeypatch.setattr(progress, "_BETWEEN_LINES_S", 0.0)
        bar.update(2)
    with Progress("layouts") as bar:
        bar.update()
    assert capsys.readouterr().err == "rounds: 3 of 9\nlayouts: 1\n"
