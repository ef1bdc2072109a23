"""Simulated load curves on disk, so that the next plan for the same workload does not simulate them again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from ampd.documents import replacing
from benchmarks.paper_plan.load_curves import LoadCurve, Question
from workloads.trace import Session, dump_session

_FORMAT = 3
"""To be raised whenever a change alters simulated curves."""


class CurveCache:
    """Curves by a key of all their inputs. A damaged or unreadable file counts as missing."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: None keeps nothing."""
        self._folder = folder

    def get(self, key: str) -> LoadCurve | None:
        if self._folder is None:
            return None
        with suppress(OSError, ValueError, KeyError, TypeError):
            row = json.loads((self._folder / f"{key}.json").read_text(encoding="utf-8"))
            return LoadCurve(tuple(row["rates"]), tuple(row["levels"]))
        return None

    def put(self, key: str, curve: LoadCurve) -> None:
        """Keep a curve. A failure only costs time, so that it is ignored."""
        if self._folder is None:
            return
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._folder / f"{key}.json") as partial:
                partial.write_text(json.dumps({"rates": curve.rates, "levels": curve.levels}), encoding="utf-8")


def digest_sessions(sessions: Sequence[Session]) -> str:
    """A digest of the rounds of sessions. Names and arrivals do not change it."""
    digest = hashlib.sha256()
    for session in sessions:
        nameless = session.model_copy(update={"session_id": "-", "arrival_s": 0.0})
        digest.update(dump_session(nameless).encode())
    return digest.hexdigest()


def key_of(question: Question, sessions_digest: str) -> str:
    parts = (
        _FORMAT,
        version("ampd"),
        question.phase,
        question.degree,
        sessions_digest,
        question.model.profile.model_dump_json(),
        question.ordering,
        question.slicing,
        question.slo,
        question.options,
        question.kv_capacity_tokens,
        question.kv_store_tokens,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
