"""What tests of the planner share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def curves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the simulated curves of replicas, which take most of a plan's time."""
    return tmp_path_factory.mktemp("curves")
