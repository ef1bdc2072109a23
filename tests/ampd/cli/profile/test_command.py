"""`ampd profile` as it is called: from an engine to a file, from points to the same file, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ampd.cli.main import main
from ampd.perf.profile import read_profile
from ampd.tiny_model import TinyModel, make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = TinyModel(layers=1, hidden_size=32, heads=2, kv_heads=1, head_dim=16, max_context_tokens=4096)
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", sizes)


@pytest.fixture(scope="module")
def points_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Points of the modelled engine, measured once."""
    out = tmp_path_factory.mktemp("points")
    flags = ["--engine", "modelled", "--model", str(folder), "--grid", "quick", "--repeats", "1"]
    flags += ["--worker-args", "--time-scale 0.05", "--output", str(out / "perf.json")]
    assert main(["profile", *flags, "--points", str(out / "points.json")]) == 0
    return out / "points.json"


def test_a_measured_file_says_what_was_measured(points_file: Path) -> None:
    profile = read_profile(points_file.with_name("perf.json"))
    row = json.loads(points_file.read_text())
    assert profile.provenance.kind == "measured"
    assert profile.provenance.assumptions["points_prefill"] == len(row["points"]["prefill"]) == 8
    assert profile.provenance.assumptions["repeats"] == 1
    assert profile.max_context_tokens == 4096
    assert profile.workers[0].kv_capacity_tokens == row["engine"]["kv_capacity_tokens"] > 0
    assert profile.kv_bytes_per_token
    assert set(profile.provenance.fit_error) >= {"prefill_mean", "decode_mean", "kv_transfer_mean"}


def test_a_refit_of_the_points_is_the_same_file(
    points_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "again.json"
    assert main(["profile", "--refit", str(points_file), "--output", str(again), "--json"]) == 0
    assert again.read_bytes() == points_file.with_name("perf.json").read_bytes()
    printed = json.loads(capsys.readouterr().out)
    assert printed["fit_error"] == read_profile(again).provenance.fit_error
    assert printed["points"] == {"prefill": 8, "decode": 6, "transfer": 3}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--grid", "huge"], "known are quick, normal, full"),
        (["--engine", "abacus"], "--engine"),
        (["--engine", "modelled", "--model", "none/here"], "no folder at"),
        (["--engine", "modelled", "--max-tokens", "40"], "the grid is empty"),
        (["--engine", "modelled", "--worker-args", "--no-such-flag 1"], "--no-such-flag"),
        (["--engine", "modelled", "--worker-args", "'open"], "no closing quotation"),
        (["--held-out", "0.9"], "--held-out"),
        (["--repeats", "0"], "--repeats"),
        (["--refit", "none.json"], "cannot be read"),
    ],
)
def test_wrong_calls_are_refused_in_one_line(
    flags: list[str], says: str, tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if "--model" in flags else ["--model", str(folder)]
    assert main(["profile", "--output", str(tmp_path / "perf.json"), *model, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not list(tmp_path.iterdir()), "nothing was written"


@pytest.mark.parametrize("flag", ["--output", "--points"])
def test_a_missing_folder_is_refused_before_anything_is_measured(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"--output": str(tmp_path / "perf.json"), flag: str(tmp_path / "none" / "file.json")}
    flags = [word for pair in files.items() for word in pair]
    assert main(["profile", "--engine", "modelled", *flags]) == 2
    assert "its folder must exist" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"engine": {"tp": 1}}, {"engine": {}}, {"points": {}}, {"engine": None}])
def test_points_that_are_not_ours_are_refused(
    change: dict[str, Any], points_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "points.json"
    wrong.write_text(json.dumps({**json.loads(points_file.read_text()), **change}))
    assert main(["profile", "--refit", str(wrong), "--output", str(tmp_path / "perf.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "not a file of measured points" in line


def test_points_that_lack_one_word_about_the_engine_are_refused(
    points_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, wrong = json.loads(points_file.read_text()), tmp_path / "points.json"
    for key in row["engine"]:
        engine = {name: value for name, value in row["engine"].items() if name != key}
        wrong.write_text(json.dumps({**row, "engine": engine}))
        assert main(["profile", "--refit", str(wrong), "--output", str(tmp_path / "perf.json")]) == 2, key
        assert "not a file of measured points" in capsys.readouterr().err
