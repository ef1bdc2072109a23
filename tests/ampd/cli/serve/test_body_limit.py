"""How large a request may be."""

import pytest

from ampd.cli.serve.graph import BODY_LIMIT_VARIABLE, body_limit_mb
from ampd.errors import UserError


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BODY_LIMIT_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("context_tokens", "expected_mb"), [(2048, 4), (40_960, 4), (262_144, 4), (262_145, 5), (1_048_576, 16), (None, 45)]
)
def test_the_limit_holds_the_longest_context(context_tokens: int | None, expected_mb: int) -> None:
    assert body_limit_mb(context_tokens) == expected_mb


def test_a_limit_that_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BODY_LIMIT_VARIABLE, "2")
    assert body_limit_mb(1_048_576) == 2


@pytest.mark.parametrize("chosen", ["many", "-1", "0", "1e3", "1" + "0" * 400, "9" * 5000])
def test_a_limit_that_is_no_number_is_one_line(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BODY_LIMIT_VARIABLE, chosen)
    with pytest.raises(UserError, match=f"{BODY_LIMIT_VARIABLE}=.*give the largest body in MB"):
        body_limit_mb(None)
