"""Curves on disk: the key names all inputs, and a folder that cannot be used is no error."""

from dataclasses import replace
from pathlib import Path

from ampd.perf.presets import analytic_model
from ampd.types import Slo
from benchmarks.paper_plan.curve_cache import CurveCache, digest_sessions, key_of
from benchmarks.paper_plan.load_curves import LoadCurve
from planner.simulator.options import SimulationOptions
from tests.planner.layout.lab import SESSIONS

from .lab import question


def test_the_key_of_a_curve_names_everything_that_it_depends_on() -> None:
    each = question("prefill", 1)
    digest = digest_sessions(SESSIONS)
    others = [
        replace(each, degree=2),
        replace(each, phase="decode"),
        replace(each, slo=Slo(0.31, 0.02)),
        replace(each, ordering="ampd"),
        replace(each, options=SimulationOptions(seed=1)),
        replace(each, kv_capacity_tokens=1),
        replace(each, model=analytic_model("llama-3.1-8b", "h100")),
    ]
    keys = {key_of(other, digest) for other in others}
    assert len(keys) == len(others)
    assert key_of(each, digest) not in keys
    assert key_of(each, digest_sessions(SESSIONS[:-1])) != key_of(each, digest)
    renamed = tuple(session.model_copy(update={"session_id": "x" + session.session_id}) for session in SESSIONS)
    assert digest_sessions(renamed) == digest


def test_a_cache_that_cannot_be_used_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    for cache in (CurveCache(None), CurveCache(blocked)):
        cache.put("k", LoadCurve((1.0,), (1.0,)))
        assert cache.get("k") is None


def test_what_is_kept_is_read_again_and_a_damaged_file_counts_as_missing(tmp_path: Path) -> None:
    cache, curve = CurveCache(tmp_path / "new"), LoadCurve((1.0, 2.5), (0.1, 0.75))
    cache.put("k", curve)
    assert CurveCache(tmp_path / "new").get("k") == curve
    (file,) = (tmp_path / "new").iterdir()
    for damaged in ("", "{}", '{"rates": 3}', "[1]"):
        file.write_text(damaged)
        assert cache.get("k") is None
