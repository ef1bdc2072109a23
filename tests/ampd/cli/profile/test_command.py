"""`ampd profile` as it is called: from an engine to a file, from points to the same file, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ampd.cli.main import main
from ampd.perf.presets import load_performance_model
from ampd.perf.profile import read_profile
from ampd.tiny_model import TinyModel, make_tiny_model
from ampd.types import Parallelism


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = TinyModel(layers=1, hidden_size=32, heads=2, kv_heads=1, head_dim=16, max_context_tokens=4096)
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", sizes)


@pytest.fixture(scope="module")
def points_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Points of the modelled engine, measured once."""
    out = tmp_path_factory.mktemp("points")
    flags = ["--engine", "modelled", "--model", str(folder), "--grid", "quick", "--repeats", "1"]
    flags += ["--worker-args", "--time-scale 0.05 --perf tiny-cpu", "--output", str(out / "perf.json")]
    assert main(["profile", *flags, "--points", str(out / "points.json")]) == 0
    return out / "points.json"


@pytest.mark.slow
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


def test_a_further_degree_is_added_to_a_file(points_file: Path, tmp_path: Path) -> None:
    first, row = points_file.with_name("perf.json"), json.loads(points_file.read_text())
    row["engine"]["tp"], row["engine"]["load_average_before"] = 2, 9.5
    points, both = tmp_path / "points.json", tmp_path / "both.json"
    points.write_text(json.dumps(row))
    flags = ["profile", "--refit", str(points), "--output", str(both), "--extend"]
    for base in (first, both):  # the second time, the degree is replaced
        assert main([*flags, str(base)]) == 0
    before, after = read_profile(first), read_profile(both)
    assert after.workers[0] == before.workers[0]
    assert after.kv_transfers[0] == before.kv_transfers[0]
    load_performance_model(both).require([Parallelism(1), Parallelism(2)], [Parallelism(1), Parallelism(2)])
    assert before.provenance.assumptions.items() < after.provenance.assumptions.items()
    assert after.provenance.assumptions["tp2_load_average_before"] == 9.5
    assert after.provenance.fit_error["tp2_decode_mean"] == before.provenance.fit_error["decode_mean"]


def test_a_file_of_another_model_is_not_extended(
    points_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "perf.json"
    argv = [
        "profile",
        "--refit",
        str(points_file),
        "--output",
        str(output),
        "--extend",
        "ampd/perf/profiles/tiny-cpu.json",
    ]
    assert main(argv) == 2
    assert "--extend: the file is of another model: its model is tiny" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--grid", "huge"], "known are quick, normal, full"),
        (["--engine", "abacus"], "--engine"),
        (["--engine", "modelled", "--model", "none/here"], "no folder at"),
        pytest.param(
            # Not that the default profile has no times for this degree: they are to be measured.
            ["--engine", "sglang", "--tp", "3"],
            "--tp 3 is not a supported degree",
            marks=pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed"),
        ),
        (["--engine", "modelled", "--max-tokens", "40", "--worker-args", "--perf tiny-cpu"], "the grid is empty"),
        (["--engine", "modelled"], "--perf is missing"),
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


TP1, PAGE_TOKENS = Parallelism(1), 16


@pytest.mark.long
def test_a_modelled_engine_is_profiled_and_refitted_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, points, again = tmp_path / "profile.json", tmp_path / "points.json", tmp_path / "again.json"
    argv = ["profile", "--engine", "modelled", "--grid", "quick", "--repeats", "1", "--json"]
    assert main([*argv, "--output", str(file), "--points", str(points)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["points"] == {"prefill": 8, "decode": 6, "transfer": 3}
    assert result["discarded"] == 0
    true, fitted = load_performance_model("tiny-cpu"), load_performance_model(file)
    assert fitted.provenance.kind == "measured"
    assert fitted.kv_capacity_tokens(TP1) == 262_144
    assert fitted.prefill_s(0, 256, TP1) > 0
    # A busy machine adds an unknown time, and takes none away. The engine takes a page with its batch.
    measured = [point for point in json.loads(points.read_text())["points"]["prefill"] if point[1] > PAGE_TOKENS]
    assert len(measured) > 4
    for hist, incr, seconds in measured:
        assert seconds > 0.99 * true.prefill_s(hist, incr, TP1)
    assert main(["profile", "--refit", str(points), "--output", str(again)]) == 0
    assert read_profile(again) == read_profile(file)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_real_engines_are_profiled(tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    file = tmp_path / "profile.json"
    # A process of its own: SGLang's imports warn, and here warnings are errors.
    argv = [sys.executable, "-m", "ampd", "profile", "--engine", "sglang", "--grid", "quick", "--repeats", "1"]
    argv += ["--output", str(file), "--worker-args=--max-total-tokens 16384", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["points"]["prefill"] >= 7
    assert result["points"]["decode"] == 6
    assert result["points"]["transfer"] == 3
    model = load_performance_model(file)
    # One repeat on a machine that may be busy: the times say nothing about each other, and the fit may flatten them.
    assert model.prefill_s(0, 64, TP1) > 0
    assert model.decode_step_s(1, 128, TP1) > 0
    assert model.kv_transfer_s(1024, TP1, TP1) > 0
    assert model.profile.kv_bytes_per_token == 2048


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--grid", "huge"], "--grid: known are quick, normal, full"),
        (["--model", "/nowhere"], "no folder at /nowhere"),
        (["--output", "/nowhere/x.json"], "its folder must exist"),
        (["--refit", "/nowhere.json"], "cannot be read"),
        (["--repeats", "0"], "--repeats"),
        (["--engine", "other"], "--engine"),
        (["--worker-args=--no-such-flag"], "--no-such-flag"),
        (["--refit", "points.json", "--points", "x.json"], "leave one out"),
    ],
)
def test_wrong_values_are_refused_in_one_line(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["profile", "--engine", "modelled", "--output", str(tmp_path / "x.json")]
    assert main([*argv, *flags]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [
        '{"points": 3}',
        '{"points": {"prefill": [[0, 16, 0.0]], "decode": [], "transfer": [], "discarded": 0}, "engine": {}}',
        pytest.param("[" * 100_000, id="nested"),
    ],
)
def test_a_file_of_other_points_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = tmp_path / "points.json"
    points.write_text(text)
    assert main(["profile", "--refit", str(points), "--output", str(tmp_path / "x.json")]) == 2
    assert "not a file of measured points" in capsys.readouterr().err
