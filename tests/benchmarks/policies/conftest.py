"""What the tests of the contest share."""

from __future__ import annotations

import pytest

from benchmarks.policies import campaign
from benchmarks.policies.prepared import Prepared

from .lab import Counted


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found = Counted()
    monkeypatch.setattr(campaign, "find", found)
    monkeypatch.setattr(Prepared, "reference_rate", lambda *_: 1.0)
    return found
