"""Generated objects as the API server and the processes take them: schemas, references, flags, environment."""

import re
from pathlib import Path
from typing import Any

import pytest
from ampd_rivals.ppd.table_file import DEFAULT_TABLE

from ampd.perf.presets import load_performance_model
from ampd.policies import registry
from ampd.types import Parallelism
from planner.layout.layout import Layout
from planner.manifest.planned import MODELS_MOUNT
from router.settings import CoordinatorSettings
from tests.k8s.pods import pods, selects
from tests.k8s.schema import problems
from tests.k8s.test_commands import FRONTENDS, each_process, parsed
from tests.k8s.test_meaning import USER_PROVIDED, references
from workers.settings import WorkerSettings

from .lab import DEPLOYMENT, MIXED, Object, by_identity, main, objects_of

VARIANTS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "single": {"layout": Layout(((1, 1),), ((1, 1),))},
    "mixed-workers": {"layout": Layout(((1, 1),), (), ((2, 2), (4, 1)))},
    "of-the-users-own": {
        "policy_modules": "tests.planner.manifest.lab",
        "kv_capacity_tokens": 12_000,
        "tool_call_parser": None,
        "reasoning_parser": None,
        "annotations": {"ampd.dev/trace": "a: b", "ampd.dev/seed": "0"},
    },
}


@pytest.fixture(params=VARIANTS)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return objects_of(**VARIANTS[request.param])


def test_every_object_is_valid(objects: list[Object]) -> None:
    found = {f"{each['kind']}/{each['metadata']['name']}": problems(each) for each in objects}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert len(by_identity(objects)) == len(objects) > 10


def test_a_graph_with_too_many_components_would_be_found() -> None:
    graph = objects_of()[-1]
    spare = graph["spec"]["components"][-1]
    graph["spec"]["components"] += [{**spare, "name": f"spare-{index}"} for index in range(20)]
    assert any("components" in line for line in problems(graph))


def test_every_process_takes_its_flags_and_agrees_with_the_others(objects: list[Object]) -> None:
    seen = {}
    for pod, _, argv, variables in each_process(objects):
        if argv[2] not in FRONTENDS:
            seen[pod.name] = parsed(argv, variables)
    coordinator: CoordinatorSettings = seen.pop("coordinator")
    assert seen
    assert coordinator.slo == DEPLOYMENT.slo
    assert coordinator.served_name == "qwen3-32b"
    for name, each in seen.items():
        worker: WorkerSettings = each
        assert name == f"{worker.role}-tp{worker.tp}"
        assert worker.slo == coordinator.slo
        assert (worker.namespace, worker.state_url, worker.perf, worker.model) == (
            coordinator.namespace,
            coordinator.state_url,
            coordinator.perf,
            coordinator.model,
        )


def test_the_policies_can_be_made(objects: list[Object]) -> None:
    for _, _, argv, variables in each_process(objects):
        if argv[2] in FRONTENDS:
            continue
        settings = parsed(argv, variables)
        for kind in registry.KINDS:
            if (text := getattr(settings, kind, None)) is not None:
                # In the container the table is where its ConfigMap is mounted.
                registry.create_named(kind, text.replace("/etc/ampd/routing/table.json", str(DEFAULT_TABLE)))


def test_references_lead_somewhere_and_files_are_mounted(objects: list[Object]) -> None:
    made = by_identity(objects).keys()
    for pod in pods(objects):
        assert references(pod) - made - USER_PROVIDED == set(), pod.name
        mounts = [mount["mountPath"] for mount in pod.main["volumeMounts"]]
        volumes = {volume["name"] for volume in pod.spec["volumes"]}
        assert {mount["name"] for mount in pod.main["volumeMounts"]} == volumes
        for path in re.findall(r"=(/[a-z][\w/.-]*)", "\n".join(pod.main.get("args", []))):
            assert any(path.startswith(f"{mount}/") for mount in mounts), (pod.name, path)
        if pod.is_graph():
            assert MODELS_MOUNT in mounts


def test_budgets_and_network_policies_hold_for_the_new_components(objects: list[Object]) -> None:
    for each in objects:
        if each["kind"] in ("PodDisruptionBudget", "NetworkPolicy"):
            selector = each["spec"].get("selector") or each["spec"]["podSelector"]
            assert [pod for pod in pods(objects) if selects(selector, pod.labels)], each["metadata"]["name"]
    budgets = [each for each in objects if each["kind"] == "PodDisruptionBudget"]
    for pod in pods(objects):
        if pod.is_graph():
            assert [budget for budget in budgets if selects(budget["spec"]["selector"], pod.labels)], pod.name


def test_the_performance_model_covers_the_layout(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(
        by_identity(objects_of())["ConfigMap", "ampd-performance-model"]["data"]["model.json"]
    )
    sides = [[Parallelism(tp) for tp, _ in side] for side in (MIXED.prefill, MIXED.decode)]
    load_performance_model(tmp_path / "model.json").require(*sides)


def test_gpus_are_those_of_the_flag(objects: list[Object]) -> None:
    for pod in pods(objects):
        flags = [flag for flag in main(pod.source)["args"] if flag.startswith("--tp=")] if pod.is_graph() else []
        limits = pod.main["resources"]["limits"]
        assert [f"--tp={limits[key]}" for key in limits if key == "nvidia.com/gpu"] == flags
