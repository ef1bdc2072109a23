"""What tests of telemetry share."""

from collections.abc import Iterator

import pytest

from ampd.telemetry import tracing


@pytest.fixture(autouse=True)
def no_round() -> Iterator[None]:
    """Every test begins and ends outside of a round."""
    token = tracing._CURRENT.set(None)
    yield
    tracing._CURRENT.reset(token)
