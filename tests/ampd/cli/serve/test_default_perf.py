"""The performance model that `ampd serve` takes by itself, on machines whose `nvidia-smi` is a script."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ampd.cli.main import main
from ampd.cli.serve.devices import default_perf
from ampd.errors import UserError
from ampd.perf.presets import load_performance_model
from tests.ampd.perf.config_lab import write_config
from tests.harness.gpus import machine_with

Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes this a machine with the named GPUs."""
    return partial(machine_with, monkeypatch, tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder as far as it is read before anything starts."""
    folder = write_config(tmp_path / "mine", {})
    (folder / "tokenizer.json").touch()
    return folder


def test_the_times_are_those_of_the_folders_model_on_the_gpu_that_was_found(machine: Machine, folder: Path) -> None:
    machine("NVIDIA H200", "NVIDIA H200")
    perf = default_perf(str(folder))
    assert perf == f"{folder}@h200"
    assert load_performance_model(perf).name == "mine on NVIDIA H200 SXM"


def test_the_tiny_model_keeps_its_own_times(machine: Machine) -> None:
    machine("NVIDIA H200")
    assert default_perf("tiny") == "tiny-cpu"


@pytest.mark.parametrize(("visible", "gpu"), [("1", "l40s"), ("0", "h20"), ("GPU-1", None), ("", None)])
def test_only_the_visible_gpus_count(
    machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch, visible: str, gpu: str | None
) -> None:
    machine("NVIDIA H20", "NVIDIA L40S")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if gpu:
        assert default_perf(str(folder)) == f"{folder}@{gpu}"
        return
    with pytest.raises(UserError, match="no GPU" if not visible else "NVIDIA H20 and NVIDIA L40S"):
        default_perf(str(folder))


def test_a_driver_that_fails_is_no_gpu(machine: Machine, folder: Path, tmp_path: Path) -> None:
    machine()
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(UserError, match="has no GPU"):
        default_perf(str(folder))


@pytest.mark.parametrize(
    ("gpus", "change", "words"),
    [
        ((), {}, ["no GPU", "--perf {folder}@h200", "--perf qwen3-32b@h20", "ampd profile"]),
        (("NVIDIA GeForce RTX 4090",), {}, ["NVIDIA GeForce RTX 4090", "h20, ", "mi300x"]),
        (
            ("NVIDIA H200",),
            {"mamba_d_state": 16},
            ["layers of an unknown kind", "ampd profile", "--perf qwen3-32b@h200"],
        ),
    ],
)
def test_times_that_cannot_be_derived_are_one_line_that_says_what_to_give(
    machine: Machine,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    gpus: tuple[str, ...],
    change: dict[str, int],
    words: list[str],
) -> None:
    machine(*gpus)
    write_config(folder, change)
    assert main(["serve", "--engine", "modelled", "--model", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word.format(folder=folder) in line for word in words), line
