"""What `ampd serve` gives each of its workers."""

from pathlib import Path
from shutil import copytree

import pytest

from ampd.cli.serve.command import _absolute, _controls, _worker_environments
from ampd.cli.serve.devices import found_gpus
from ampd.cli.serve.graph import GraphSite
from ampd.cli.serve.settings import EngineName, ServeSettings
from ampd.errors import UserError
from ampd.tiny_model import tiny_model_path
from tests.harness.gpus import machine_with
from workers.engines.modelled_tokens import read_model_folder

STORE = "AMPD_KV_STORE_GIB"
MODEL = Path("/nowhere")
SGLANG = ServeSettings(engine=EngineName.SGLANG, prefill=1, prefill_tp=2, decode=2)


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv(STORE, raising=False)
    monkeypatch.setattr("ampd.cli.serve.command.default_size_bytes", lambda workers: (96 << 30) // workers)


def test_workers_of_one_machine_share_its_memory() -> None:
    assert [environment[STORE] for environment in _worker_environments(SGLANG, MODEL)] == ["32.000"] * 3


def test_a_users_size_is_per_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE, "5")
    assert [environment[STORE] for environment in _worker_environments(SGLANG, MODEL)] == ["5"] * 3


@pytest.fixture
def one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for name in LIMITS:
        monkeypatch.delenv(name, raising=False)
    machine_with(monkeypatch, tmp_path, "NVIDIA H20")


LIMITS = ("AMPD_MAX_TOTAL_TOKENS", "AMPD_MEM_FRACTION")
PAIR = ServeSettings(engine=EngineName.SGLANG, prefill=1, decode=1)


@pytest.mark.usefixtures("one_gpu")
def test_two_engines_that_share_a_gpu_fit_into_it_whichever_starts_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copytree(tiny_model_path(), tmp_path / "model")
    weight_bytes = 20 << 30
    with (folder / "model.safetensors").open("wb") as weights:
        weights.truncate(weight_bytes)
    (gpu,) = found_gpus()
    (first, second) = _worker_environments(PAIR, folder)
    assert first == second
    token_bytes = read_model_folder(folder).kv_bytes_per_token
    used_bytes = 2 * (weight_bytes + int(first[LIMITS[0]]) * token_bytes)
    left_bytes = (gpu.memory_mib - gpu.used_mib << 20) * 0.9 - used_bytes
    assert first[LIMITS[1]] == "0.9", "SGLang leaves a tenth of what is free at its start"
    assert 2 * 2e9 <= left_bytes < 2 * 2e9 + 2 * token_bytes + 1
    monkeypatch.setenv(LIMITS[0], "5000")
    assert [environment[LIMITS[0]] for environment in _worker_environments(PAIR, folder)] == ["5000"] * 2
    alone = ServeSettings(engine=EngineName.SGLANG, prefill=0, decode=1)
    assert not set(LIMITS) & _worker_environments(alone, folder)[0].keys()
    with (folder / "model.safetensors").open("wb") as weights:
        weights.truncate(65 << 30)
    with pytest.raises(UserError, match=r"2 engines with 65\.0 GiB of weights each do not fit into the 140\.4 GiB"):
        _worker_environments(PAIR, folder)


def test_a_modelled_engine_is_one_process_without_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    settings = ServeSettings(engine=EngineName.MODELLED, prefill=1, prefill_tp=4, decode=1)
    assert _worker_environments(settings, MODEL) == [{"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}] * 2


@pytest.mark.parametrize(("ports", "controls"), [((1, 2, 3, 4), ("http://h:3", "http://h:4")), ((), ())])
def test_the_system_ports_of_all_coordinators_are_registered(ports: tuple[int, ...], controls: tuple[str, ...]) -> None:
    path = Path("/nowhere")
    site = GraphSite(
        model_path=path,
        model_names=("m",),
        state_url="",
        port=1,
        discovery_dir=path,
        body_limit_mb=1,
        worker_env=({}, {}),
        system_ports=ports,
    )
    assert _controls(ServeSettings(metrics_host="h", coordinators=2), site) == controls


def test_other_commands_find_the_performance_model_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "file.json").touch()
    names = ["tiny-cpu", "qwen3-32b@h20", "mine@h20", "file.json"]
    assert [_absolute(name) for name in names] == [*names[:2], f"{tmp_path}/mine@h20", f"{tmp_path}/file.json"]
