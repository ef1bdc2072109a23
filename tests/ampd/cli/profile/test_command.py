"""`ampd profile` as it is called: from an engine to a file, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ampd.cli import profile
from ampd.cli.main import main
from ampd.perf.corrections import CorrectedModel
from ampd.perf.presets import load_performance_model
from ampd.perf.profile import read_profile, write_profile
from ampd.tiny_model import TinyModel, make_tiny_model
from ampd.types import Parallelism
from planner.profiler import extended
from workers.engines import create_engine
from workers.engines.base import Engine, EngineError
from workers.settings import WorkerSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = TinyModel(layers=1, hidden_size=32, heads=2, kv_heads=1, head_dim=16, max_context_tokens=4096)
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", sizes)


@pytest.fixture(scope="module")
def points_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Points of the modelled engine, measured once."""
    out = tmp_path_factory.mktemp("points")
    flags = [*quick(folder), "--output", str(out / "perf.json")]
    assert main(["profile", *flags, "--points", str(out / "points.json")]) == 0
    return out / "points.json"


def quick(folder: Path) -> list[str]:
    """Flags of a profile that takes seconds."""
    flags = ["--engine", "modelled", "--model", str(folder), "--grid", "quick", "--repeats", "1"]
    return [*flags, "--worker-args", "--time-scale 0.05 --perf tiny-cpu"]


@pytest.mark.slow
def test_a_measured_file_says_what_was_measured(points_file: Path) -> None:
    found = read_profile(points_file.with_name("perf.json"))
    assert found.provenance.kind == "measured"
    assert found.provenance.assumptions["points_prefill"] == len(kept(points_file, "prefill")) == 8
    assert found.host_link_bytes_per_s
    assert found.provenance.assumptions["repeats"] == 1
    assert found.max_context_tokens == 4096
    assert found.workers[0].kv_capacity_tokens == 262_144
    assert found.kv_bytes_per_token
    assert set(found.provenance.fit_error) >= {"prefill_mean", "decode_mean", "kv_transfer_mean"}


def kept(points_file: Path, curve: str) -> list[tuple[list[int], Any]]:
    """The points of a curve, and the measurements of each."""
    points = json.loads(points_file.read_text())["points"]
    return [(point, seconds) for (name, *point), seconds in points if name == curve]


@pytest.mark.slow
def test_a_run_that_was_interrupted_goes_on(
    points_file: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = json.loads(points_file.read_text())
    del whole["points"][3]
    (tmp_path / "perf.json.points").write_text(json.dumps(whole))
    prefill_s, measured = profile.EngineProbe.prefill_s, []

    async def counted(self: profile.EngineProbe, hist_tokens: int, incr_tokens: int) -> float | None:
        measured.append((hist_tokens, incr_tokens))
        return await prefill_s(self, hist_tokens, incr_tokens)

    monkeypatch.setattr(profile.EngineProbe, "prefill_s", counted)
    assert main(["profile", *quick(folder), "--output", str(tmp_path / "perf.json")]) == 0
    assert measured == 2 * [(0, 768)], "one warms up"
    assert f"{len(whole['points'])} measurements are reused" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["perf.json"]
    before, after = (read_profile(path) for path in (points_file.with_name("perf.json"), tmp_path / "perf.json"))
    assert before.workers[0].decode == after.workers[0].decode


@pytest.mark.slow
@pytest.mark.parametrize("text", ['{"run": {"model": "another"}, "points": []}', "", "[1]", "{}"])
def test_a_file_of_other_measurements_is_refused(
    text: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = tmp_path / "points"
    points.write_text(text)
    argv = ["profile", *quick(folder), "--output", str(tmp_path / "perf.json"), "--points", str(points)]
    assert main(argv) == 2
    assert f"{points} has measurements of something else" in capsys.readouterr().err
    assert points.read_text() == text


@pytest.mark.slow
def test_measurements_of_another_machine_are_refused(
    points_file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "_machine", lambda _engine: "another GPU")
    argv = ["profile", *quick(folder), "--output", str(points_file.with_name("perf2.json"))]
    assert main([*argv, "--points", str(points_file)]) == 2
    assert "something else than this engine on this machine" in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_disk_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write)
    assert main(["profile", *quick(folder), "--output", str(tmp_path / "perf.json")]) == 2
    assert "perf.json.points: cannot write the measurements (No space left on device)" in capsys.readouterr().err


@pytest.mark.slow
def test_one_engine_takes_the_whole_memory_of_a_gpu(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SGLang does, an engine takes 80 % of what is free, which must have room for the weights."""
    free_bytes, weights_bytes = [80e9], 33e9

    def create(settings: WorkerSettings, model: CorrectedModel | None) -> Engine:
        if free_bytes[0] < weights_bytes:
            raise EngineError("Loaded weights leave no GPU memory")
        free_bytes[0] *= 0.2
        return create_engine(settings, model)

    monkeypatch.setattr(profile, "create_engine", create)
    assert main(["profile", *quick(folder), "--output", str(tmp_path / "perf.json")]) == 0


@pytest.mark.slow
def test_a_further_degree_is_added_to_a_file(points_file: Path, tmp_path: Path) -> None:
    before = read_profile(points_file.with_name("perf.json"))
    two = {"tp": 2}
    measured = before.model_copy(
        update={
            "workers": tuple(curves.model_copy(update=two) for curves in before.workers),
            "kv_transfers": tuple(
                moves.model_copy(update={"tp_source": 2, "tp_target": 2}) for moves in before.kv_transfers
            ),
        }
    )
    after = extended(extended(before, measured), measured)  # the second time, the degree is replaced
    assert after.workers[0] == before.workers[0]
    assert after.kv_transfers[0] == before.kv_transfers[0]
    both = tmp_path / "both.json"
    write_profile(after, both)
    load_performance_model(both).require([Parallelism(1), Parallelism(2)], [Parallelism(1), Parallelism(2)])
    assert before.provenance.assumptions.items() < after.provenance.assumptions.items()
    assert after.provenance.assumptions["tp2_repeats"] == 1
    assert after.provenance.fit_error["tp2_decode_mean"] == before.provenance.fit_error["decode_mean"]


@pytest.mark.slow
def test_a_file_of_another_model_is_not_extended(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "perf.json"
    argv = ["profile", *quick(folder), "--output", str(output), "--extend", "ampd/perf/profiles/tiny-cpu.json"]
    assert main(argv) == 2
    assert "--extend: the file is of another model: its model is tiny" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--grid", "huge"], "--grid"),
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
        (["--repeats", "0"], "--repeats"),
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


TP1, PAGE_TOKENS = Parallelism(1), 16


@pytest.mark.long
def test_a_modelled_engine_is_profiled_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, points = tmp_path / "profile.json", tmp_path / "points.json"
    argv = ["profile", "--engine", "modelled", "--grid", "quick", "--repeats", "1", "--json"]
    assert main([*argv, "--output", str(file), "--points", str(points)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["points"] == {"prefill": 8, "decode": 6, "transfer": 3, "reload": 3, "mixed": 8}
    assert result["discarded"] == 0
    true, fitted = load_performance_model("tiny-cpu"), load_performance_model(file)
    assert fitted.provenance.kind == "measured"
    assert fitted.kv_capacity_tokens(TP1) == 262_144
    assert fitted.prefill_s(0, 256, TP1) > 0
    # A busy machine adds an unknown time, and takes none away. The engine takes a page with its batch.
    measured = [(*point, seconds) for point, seconds in kept(points, "prefill") if point[1] > PAGE_TOKENS]
    assert len(measured) > 4
    for hist, incr, (seconds,) in measured:
        assert seconds > 0.99 * true.prefill_s(hist, incr, TP1)


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
    assert result["points"]["transfer"] == result["points"]["reload"] == 3
    model = load_performance_model(file)
    # One repeat on a machine that may be busy: the times say nothing about each other, and the fit may flatten them.
    assert model.prefill_s(0, 64, TP1) > 0
    assert model.decode_step_s(1, 128, TP1) > 0
    assert model.kv_transfer_s(1024, TP1, TP1) > 0
    assert model.profile.kv_bytes_per_token == 2048
    assert model.profile.host_link_bytes_per_s


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--grid", "huge"], "--grid"),
        (["--model", "/nowhere"], "no folder at /nowhere"),
        (["--output", "/nowhere/x.json"], "its folder must exist"),
        (["--repeats", "0"], "--repeats"),
        (["--engine", "other"], "--engine"),
        (["--worker-args=--no-such-flag"], "--no-such-flag"),
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
