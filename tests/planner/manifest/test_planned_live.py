"""A plan's manifest outside Kubernetes: its commands, environment and files serve a request.

Replaced in the manifest: the engine (modelled, because nobody has GPUs here) and the volume with the model, which every
pod makes for itself as in the overlay `no-gpu`; what `PodLab` replaces, it says.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ampd.cli.main import main as ampd
from planner.layout.layout import Layout
from planner.layout.search import Search
from tests.k8s.pod_lab import PodLab
from tests.k8s.rendering import rendered
from tests.k8s.test_no_gpu import ask

from .lab import Object, components, graph_of, main, needs_kubectl

ORDER = ("ampd-redis", "prefill-tp1", "decode-tp1", "coordinator", "frontend")

pytestmark = [needs_kubectl, pytest.mark.slow, pytest.mark.timeout(600)]


def without_gpus(objects: list[Object]) -> list[Object]:
    """The graph with the engine and the model of the overlay `no-gpu`."""
    donor = components(rendered("overlays/no-gpu"))["coordinator"]["podTemplate"]["spec"]
    (models,) = (volume for volume in donor["volumes"] if volume["name"] == "models")
    for component in graph_of(objects)["spec"]["components"]:
        pod = component["podTemplate"]["spec"]
        pod["volumes"] = [models if volume["name"] == "models" else volume for volume in pod["volumes"]]
        pod["initContainers"] = donor["initContainers"]
        container = pod["containers"][0]
        # The modelled engine has no memory of its own to give to a store.
        arguments = [arg for arg in container["args"] if not arg.startswith("--kv-store-gib=")]
        container["args"] = ["--engine=modelled" if arg == "--engine=sglang" else arg for arg in arguments]
    return objects


@pytest.mark.long
def test_the_processes_of_a_plan_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Workers of both roles are wanted, whatever a search would choose.
    monkeypatch.setattr(Search, "_guess", lambda _: Layout(((1, 1),), ((1, 1),)))
    trace, manifest = tmp_path / "trace.jsonl", tmp_path / "plan.yaml"
    rounds = [{"incr_tokens": 40, "output_tokens": 5}]
    trace.write_text("\n".join(json.dumps({"session_id": f"s{n}", "arrival_s": n, "rounds": rounds}) for n in range(9)))
    argv = ["plan", str(trace), "--perf", "tiny-cpu", "--gpus", "2", "--degrees", "1", "--ttft", "1.5", "--itl", "0.2"]
    argv += ["--routing", "always-remote", "--budget-s", "0", "--output-manifest", str(manifest)]
    assert ampd([*argv, "--manifest-model-path", "/models/tiny"]) == 0
    capsys.readouterr()
    objects = without_gpus(list(yaml.safe_load_all(manifest.read_text(encoding="utf-8"))))
    assert "--engine=modelled" in main(components(objects)["decode-tp1"])["args"]
    with PodLab(objects, tmp_path / "pods") as lab:
        assert {each.pod.name for each in lab.running} == {*ORDER}
        # One after the other: with discovery through files, a process whose watch begins while another one registers
        # may lose its watch, and Dynamo ends it.
        for each in sorted(lab.running, key=lambda each: ORDER.index(each.pod.name)):
            lab.start(each)
            lab.until(each, "readinessProbe")
        answer: Any = ask(f"http://127.0.0.1:{lab.of('frontend')[0].ports['http']}", "session-1")
        assert answer["choices"][0]["message"]["content"]
        record = answer["nvext"]["engine_data"]["ampd"]
        assert record["policy"] == "always-remote"
        assert record["route"] == "remote"
        assert lab.end() == {}
