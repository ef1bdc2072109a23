"""`ampd serve` says where every process's metrics are, and Prometheus finds them there."""

import json
from pathlib import Path

import httpx
import pytest

from tests.waiting import PATIENCE_S
from tools.demo import running_graph

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.long
def test_all_targets_answer(tmp_path: Path) -> None:
    flags = ["--engine", "modelled", "--port", "0", "--decode", "2", "--log-dir", str(tmp_path)]
    with running_graph(flags, print) as url:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 200
        targets = json.loads((tmp_path / "metrics.json").read_text())
        places = {target["labels"]["process"]: target["targets"][0] for target in targets}
        texts = {name: httpx.get(f"http://{place}/metrics", timeout=PATIENCE_S).text for name, place in places.items()}
        health = {
            name: httpx.get(f"http://{place}/health", timeout=PATIENCE_S).status_code for name, place in places.items()
        }
    assert places.keys() == {"prefill-0", "decode-1", "decode-2", "coordinator-0", "frontend"}
    assert set(health.values()) == {200}
    assert "dynamo_frontend_requests_total" in texts["frontend"]
    assert 'ampd_rounds_total{dynamo_component="coordinator"' in texts["coordinator-0"]
    assert all("ampd_prefill_queue_tasks{" in texts[name] for name in ("prefill-0", "decode-1", "decode-2"))
    assert all(place.startswith("127.0.0.1:") for place in places.values())
