"""The file of a performance model: what is read back equal, and how a wrong one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ampd.errors import UserError
from ampd.perf.profile import PerformanceProfile, read_profile, write_profile

PIECE = {"from_incr_tokens": 0, "alpha_s": 0.0, "beta_s_per_token": 1e-4, "gamma_s_per_token2": 0.0}
STEP = {"from_batch": 0, "alpha_s": 0.01, "beta_s_per_sequence": 1e-4}
MOVE = {"from_tokens": 0, "alpha_s": 0.0, "beta_s_per_token": 1e-6}
WORKER: dict[str, Any] = {
    "tp": 1,
    "prefill": {"segments": [PIECE]},
    "decode": {"context_s_per_token": 1e-8, "segments": [STEP]},
}
TRANSFER = {"tp_source": 1, "tp_target": 1, "segments": [MOVE]}
PROFILE: dict[str, Any] = {
    "provenance": {
        "kind": "rough",
        "source": "a test",
        "model": "m",
        "gpu": "g",
        "date": "2026-01-01",
        "method": "made up",
    },
    "workers": [WORKER],
    "kv_transfers": [TRANSFER],
}


def test_a_profile_is_read_back_equal(tmp_path: Path) -> None:
    profile = PerformanceProfile.model_validate(PROFILE)
    write_profile(profile, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == profile


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": [WORKER, WORKER]}, r"a tp occurs twice in \[1, 1\]"),
        ({"kv_transfers": [TRANSFER, TRANSFER]}, "a pair .* occurs twice"),
        ({"workers": []}, "workers"),
        ({"workers": [WORKER | {"prefill": {"segments": [PIECE | {"from_incr_tokens": 5}]}}]}, "must have .* 0, not 5"),
        ({"workers": [WORKER | {"prefill": {"segments": [PIECE, PIECE]}}]}, "must grow from segment to segment"),
        ({"workers": [WORKER | {"prefill": {"segments": [PIECE | {"alpha_s": -1}]}}]}, "alpha_s"),
        ({"host_link_bytes_per_s": "inf"}, "host_link_bytes_per_s"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_wrong_profile_is_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(PROFILE | changes))
    with pytest.raises(UserError, match=message) as caught:
        read_profile(path)
    assert "\n" not in str(caught.value)
