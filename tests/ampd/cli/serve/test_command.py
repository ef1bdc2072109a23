"""What `ampd serve` gives each of its workers."""

from pathlib import Path

import pytest

from ampd.cli.serve.command import _absolute, _controls, _worker_environments
from ampd.cli.serve.graph import GraphSite
from ampd.cli.serve.settings import EngineName, ServeSettings

STORE = "AMPD_KV_STORE_GIB"
SGLANG = ServeSettings(engine=EngineName.SGLANG, prefill=1, prefill_tp=2, decode=2)


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv(STORE, raising=False)
    monkeypatch.setattr("ampd.cli.serve.command.default_size_bytes", lambda workers: (96 << 30) // workers)


def test_workers_of_one_machine_share_its_memory() -> None:
    assert [environment[STORE] for environment in _worker_environments(SGLANG)] == ["32.000"] * 3


def test_a_users_size_is_per_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE, "5")
    assert [environment[STORE] for environment in _worker_environments(SGLANG)] == ["5"] * 3


def test_a_modelled_engine_is_one_process_without_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    settings = ServeSettings(engine=EngineName.MODELLED, prefill=1, prefill_tp=4, decode=1)
    assert _worker_environments(settings) == [{"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}] * 2


@pytest.mark.parametrize(("ports", "controls"), [((1, 2, 3, 4), ("http://h:3", "http://h:4")), ((), ())])
def test_the_system_ports_of_all_coordinators_are_registered(ports: tuple[int, ...], controls: tuple[str, ...]) -> None:
    path = Path("/nowhere")
    site = GraphSite(
        model_path=path,
        model_name="m",
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
