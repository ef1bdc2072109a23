from dataclasses import replace
from pathlib import Path

import pytest

from ampd.cli.serve.devices import FoundGpu, found_gpus, parsed, visible_gpus, worker_environments
from ampd.errors import UserError
from tests.harness.gpus import machine_with


def test_without_gpus_the_cores_are_shared_out() -> None:
    assert [env["OMP_NUM_THREADS"] for env in worker_environments([1, 1, 1], [], cpus=8)] == ["2", "2", "2"]


def test_more_workers_than_cores_get_one_thread_each() -> None:
    assert worker_environments([1] * 6, [], cpus=2)[5]["OMP_NUM_THREADS"] == "1"


def test_each_worker_gets_its_own_gpus() -> None:
    environments = worker_environments([2, 2], ["0", "1", "2", "3"], cpus=8)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environments] == ["0,1", "2,3"]


def test_workers_of_unequal_degrees_get_their_own_gpus() -> None:
    environments = worker_environments([4, 1, 2], ["7", "6", "5", "4", "3", "2", "1", "0"], cpus=8)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environments] == ["7,6,5,4", "3", "2,1"]


def test_without_gpus_each_rank_has_its_share_of_the_cores() -> None:
    assert [env["OMP_NUM_THREADS"] for env in worker_environments([2, 2, 1], [], cpus=16)] == ["3", "3", "3"]


def test_a_single_gpu_is_shared() -> None:
    assert worker_environments([1, 1], ["5"], cpus=8) == [{"CUDA_VISIBLE_DEVICES": "5"}] * 2


def test_too_few_gpus_are_refused_with_the_numbers() -> None:
    with pytest.raises(UserError, match=r"2 workers at --tp 4 need 8 GPUs, this machine shows 2"):
        worker_environments([4, 4], ["0", "1"], cpus=8)
    with pytest.raises(UserError, match=r"3 workers at --tp 2 and 1 need 5 GPUs, this machine shows 4"):
        worker_environments([2, 2, 1], ["0", "1", "2", "3"], cpus=8)
    with pytest.raises(UserError, match=r"1 workers at --tp 2 need 2 GPUs, this machine shows 1"):
        worker_environments([2], ["0"], cpus=8)


def test_an_empty_cuda_visible_devices_hides_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_a_listing_is_read() -> None:
    listing = "0, NVIDIA H200, 143771, 4, 580.95.05\n1, NVIDIA H200, 143771, [N/A], 580.95.05\n"
    first = FoundGpu(0, "NVIDIA H200", 143771, 4, "580.95.05")
    assert parsed(listing) == [first, replace(first, index=1, used_mib=0)]


def test_visible_gpus_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, tmp_path, "NVIDIA H20", "NVIDIA L40S")
    assert visible_gpus() == ["0", "1"]
    assert [gpu.name for gpu in found_gpus()] == ["NVIDIA H20", "NVIDIA L40S"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert (visible_gpus(), [gpu.name for gpu in found_gpus()]) == (["1"], ["NVIDIA L40S"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    assert (visible_gpus(), len(found_gpus())) == (["GPU-1"], 2)


@pytest.mark.parametrize(
    ("script", "words"), [("echo no driver; exit 9", "nvidia-smi fails: no driver"), ("echo a table", "unknown form")]
)
def test_a_driver_that_fails_leaves_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    machine_with(monkeypatch, tmp_path)
    (tmp_path / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    assert visible_gpus() == []
    with pytest.raises(UserError, match=words):
        found_gpus()
