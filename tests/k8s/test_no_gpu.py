"""The overlay `no-gpu` outside Kubernetes: exactly its commands and environment serve a request and end in time."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from tests.k8s.pod_lab import PodLab
from tests.k8s.rendering import needs_kubectl, rendered

pytestmark = [needs_kubectl, pytest.mark.slow, pytest.mark.timeout(600)]

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@pytest.mark.long
def test_the_processes_of_the_manifests_serve(tmp_path: Path) -> None:
    with PodLab(rendered("overlays/no-gpu"), tmp_path) as lab:
        (redis,) = lab.of("ampd-redis")
        lab.start(redis)
        lab.until(redis, "readinessProbe")
        others = [replica for replica in lab.running if replica is not redis]
        assert {replica.pod.name: replica.pod.replicas for replica in others} == {
            "frontend": 1,
            "coordinator": 2,
            "prefill": 1,
            "decode": 1,
        }
        for replica in others:
            lab.start(replica)
        for replica in others:
            for probe in PROBES:
                lab.until(replica, probe)
        lab.until(redis, "livenessProbe")

        (frontend,) = lab.of("frontend")
        url = f"http://127.0.0.1:{frontend.ports['http']}"
        answers = [ask(url, f"session-{number}") for number in range(4)]
        for answer in answers:
            assert answer["choices"][0]["message"]["content"]
            assert answer["usage"]["completion_tokens"] == 5
            assert answer["nvext"]["engine_data"]["ampd"]["policy"] == "predictive"

        # All pods are deleted in the middle of a round: it ends first.
        begun = Event()
        with ThreadPoolExecutor(1) as pool:
            tokens = pool.submit(stream, url, 80, begun)
            assert begun.wait(60)
            assert lab.end() == {}
            assert tokens.result() == 80


def ask(url: str, session: str) -> Any:
    """One chat round, as soon as the graph answers."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "max_tokens": 5,
        "nvext": {"extra_fields": ["engine_data"]},
    }
    with httpx.Client(base_url=url, timeout=30) as client:
        for _ in range(600):
            reply = client.post("/v1/chat/completions", json=body, headers={"x-dynamo-session-id": session})
            if reply.status_code == 200:
                return reply.json()
            # Until the model is in discovery.
            assert reply.status_code in (404, 503), reply.text
            time.sleep(0.1)
    raise AssertionError(f"the frontend did not serve: {reply.text}")


def stream(url: str, tokens: int, begun: Event) -> int:
    """A streamed round; returns how many tokens it brought.

    `begun` is set with the second output: the first one may come from a prefill worker, before a decode worker has the
    round. A decode worker that ends takes no new one.
    """
    body = {"model": "tiny", "prompt": "Count on.", "max_tokens": tokens, "stream": True}
    body["stream_options"] = {"include_usage": True}
    usage = outputs = 0
    with httpx.Client(base_url=url, timeout=60) as client, client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                if chunk.get("usage"):
                    usage = chunk["usage"]["completion_tokens"]
                outputs += any(choice["text"] for choice in chunk["choices"])
                if outputs > 1:
                    begun.set()
    return usage
