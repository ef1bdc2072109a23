"""Deployments to try the manifest with, and what the tests read out of objects."""

import json
import shutil
import subprocess
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st

from ampd.perf.presets import analytic_model
from ampd.types import Slo
from planner.layout.layout import Layout
from planner.manifest.files import base_objects
from planner.manifest.planned import Deployment, deployment_objects

Object = dict[str, Any]
MARKER = "read-by"

K8S = Path(str(files("k8s")))

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")

MIXED = Layout(((2, 1), (4, 3)), ((1, 2), (8, 1)))
DEPLOYMENT = Deployment(
    layout=MIXED,
    model_path="/models/qwen3-32b",
    model_name="qwen3-32b",
    profile=analytic_model("qwen3-32b", "h200").profile,
    slo=Slo(0.35, 0.04),
    policies={
        "routing": "predictive(spread=0.1)",
        "binding": "least-kv",
        "pools": "static",
        "ordering": "on-time",
        "slicing": "whole",
    },
    tool_call_parser="hermes",
    reasoning_parser="qwen3",
    annotations={"ampd.dev/rate-sessions-per-second": "6"},
)

_groups = st.dictionaries(st.integers(1, 16), st.integers(1, 9), min_size=1, max_size=11).map(
    lambda counts: tuple(sorted(counts.items()))
)
layouts = st.builds(Layout, _groups, _groups)


_base = cache(base_objects)


def objects_of(**changes: Any) -> list[Object]:
    # The copy is quicker than another look at the files.
    return deployment_objects(replace(DEPLOYMENT, **changes), deepcopy(_base()))


def of_kind(objects: Iterable[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def graph_of(objects: Iterable[Object]) -> Object:
    (graph,) = of_kind(objects, "DynamoGraphDeployment")
    return graph


def components(objects: Iterable[Object]) -> dict[str, Any]:
    return {each["name"]: each for each in graph_of(objects)["spec"]["components"]}


def main(component: Object) -> Object:
    (container,) = component["podTemplate"]["spec"]["containers"]
    return dict(container)


def by_identity(objects: Iterable[Object]) -> dict[tuple[str, str], Object]:
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def built(folder: Path) -> list[Object]:
    """What kustomize makes of a folder."""
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def read_by_kubectl(path: Path) -> list[Object]:
    """A file's objects as kubectl reads them, with an annotation more: `kubectl kustomize` does not say their types."""
    command = ["kubectl", "annotate", "--local", "-f", str(path), f"{MARKER}=yes", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    decoder, rest, objects = json.JSONDecoder(), done.stdout.strip(), []
    while rest:
        each, end = decoder.raw_decode(rest)
        objects.append(each)
        rest = rest[end:].strip()
    for each in objects:
        assert each["metadata"]["annotations"].pop(MARKER) == "yes"
        if not each["metadata"]["annotations"]:
            del each["metadata"]["annotations"]
    return objects
