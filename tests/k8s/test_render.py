"""Every kustomization renders, alone and combined, and every document is one that the API server takes in full."""

import copy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.rendering import (
    ALL,
    COMBINATIONS,
    GRAPHS,
    K8S,
    KUSTOMIZATIONS,
    for_each,
    graph_of,
    kustomize_together,
    named,
    needs_kubectl,
    rendered,
)
from tests.k8s.schema import graph_problems, problems

pytestmark = needs_kubectl


def test_no_kustomization_is_left_out() -> None:
    folders = {str(path.parent.relative_to(K8S)) for path in K8S.rglob("kustomization.yaml")}
    known = {*KUSTOMIZATIONS, *(part for parts in COMBINATIONS.values() for part in parts)}
    assert folders == known


@pytest.mark.slow
@for_each(ALL)
def test_every_document_is_valid(name: str) -> None:
    documents = rendered(name)
    assert documents
    found = {f"{each['kind']}/{each['metadata']['name']}": problems(each) for each in documents}
    assert {key: lines for key, lines in found.items() if lines} == {}


@for_each(ALL)
def test_no_object_comes_twice(name: str) -> None:
    names = [(each["apiVersion"], each["kind"], each["metadata"]["name"]) for each in rendered(name)]
    assert len(names) == len(set(names))


@for_each(GRAPHS)
def test_nothing_that_kustomize_copies_from_is_applied(name: str) -> None:
    assert not [each for each in rendered(name) if each["apiVersion"].startswith("ampd.dev/")]


MISTAKES = {
    "an unknown field of a component": (("spec", "components", 2, "sharedMemory"), "1Gi"),
    "an unknown field deep in a pod": (
        ("spec", "components", 2, "podTemplate", "spec", "containers", 0, "readinessProbe", "period"),
        5,
    ),
    "an unknown type": (("spec", "components", 2, "type"), "router"),
    "a number where a text belongs": (("spec", "env", 1, "value"), 5),
    "a name twice": (("spec", "components", 3, "name"), "Prefill"),
    "another container": (("spec", "components", 1, "podTemplate", "spec", "containers", 0, "name"), "router"),
    "an unknown field at the top": (("components",), []),
    "an unknown field of the metadata": (("metadata", "label"), {}),
    "a status": (("status",), {}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_graph_is_found(mistake: str) -> None:
    document = copy.deepcopy(graph_of(rendered("base")))
    (*way, last), value = MISTAKES[mistake]
    place: Any = document
    for step in way:
        place = place[step]
    place[last] = value
    assert graph_problems(document)


def test_a_mistake_in_redis_is_found() -> None:
    document = copy.deepcopy(named(rendered("base"), "StatefulSet", "ampd-redis"))
    document["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["period"] = 5
    assert problems(document)


def test_a_patch_fails_when_the_components_are_in_another_order(tmp_path: Path) -> None:
    patch = "- {op: test, path: /spec/components/1/name, value: prefill}"
    with pytest.raises(subprocess.CalledProcessError) as failure:
        kustomize_together(tmp_path, ["base"], patches=[{"target": {"kind": "DynamoGraphDeployment"}, "patch": patch}])
    assert "testing value" in failure.value.stderr


def test_the_overlay_of_the_readme_renders(tmp_path: Path) -> None:
    """Another image, another performance model, workers of another parallelism: what a user changes."""
    patch = """
- {op: test, path: /spec/components/2/name, value: prefill}
- {op: copy, from: /spec/components/2, path: /spec/components/-}
- {op: replace, path: /spec/components/4/name, value: prefill-tp2}
- {op: replace, path: /spec/components/4/podTemplate/spec/containers/0/args/3, value: --tp=2}
"""
    model = {"name": "ampd-performance-model", "behavior": "replace", "literals": ["model.json={}"]}
    documents = kustomize_together(
        tmp_path,
        ["base"],
        components=["components/rdma"],
        images=[{"name": "ampd", "newName": "registry.example/ampd", "newTag": "0.1.0"}],
        configMapGenerator=[{**model, "options": {"disableNameSuffixHash": True}}],
        patches=[{"target": {"kind": "DynamoGraphDeployment", "name": "ampd"}, "patch": patch}],
    )
    assert not [line for each in documents for line in problems(each)]
    assert named(documents, "ConfigMap", "ampd-performance-model")["data"] == {"model.json": "{}"}
    components = graph_of(documents)["spec"]["components"]
    mains = {each["name"]: each["podTemplate"]["spec"]["containers"][0] for each in components}
    assert {main["image"] for main in mains.values()} == {"registry.example/ampd:0.1.0"}
    assert "--tp=2" in mains["prefill-tp2"]["args"]
    assert "--tp=1" in mains["prefill"]["args"]
    for name in ("prefill", "decode", "prefill-tp2"):
        assert mains[name]["resources"]["limits"]["rdma/ib"] == 1
        assert mains[name]["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert "rdma/ib" not in mains["coordinator"]["resources"]["limits"]
