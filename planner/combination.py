"""One simulation among those of a call: a mode, policies and a rate."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """How the replicas are used."""

    DISAGGREGATED = "disaggregated"
    ALWAYS_REMOTE = "always-remote"
    COLOCATED = "colocated"
    CONTINUUM = "continuum"


@dataclass(frozen=True, slots=True)
class Combination:
    """One simulation of a call."""

    mode: Mode
    routing: str
    ordering: str
    rate: float | None

    @property
    def label(self) -> str:
        """A name for tables and plots, without the rate."""
        if self.mode is Mode.DISAGGREGATED:
            return f"{self.routing} / {self.ordering}"
        return str(self.mode)
