"""The objects of hand-made and of arbitrary layouts: replicas, GPUs, policies, targets, performance model."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.errors import UserError
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import MODELS, analytic_model, load_performance_model
from ampd.types import Parallelism
from planner.layout.layout import Layout
from planner.manifest import planned
from planner.manifest.files import base_objects
from planner.manifest.planned import MOST_COMPONENTS, deployment_objects

from .lab import DEPLOYMENT, MIXED, by_identity, components, graph_of, layouts, main, objects_of, of_kind

GPU = "nvidia.com/gpu"


def test_each_group_of_replicas_is_a_component() -> None:
    graph = components(objects_of())
    assert list(graph) == ["frontend", "coordinator", "prefill-tp2", "prefill-tp4", "decode-tp1", "decode-tp8"]
    for role, groups in (("prefill", MIXED.prefill), ("decode", MIXED.decode)):
        for tp, count in groups:
            component = graph[f"{role}-tp{tp}"]
            container = main(component)
            assert component["replicas"] == count
            assert component["type"] == role
            assert component["sharedMemorySize"] == f"{4 * tp}Gi"
            assert container["resources"]["limits"][GPU] == container["resources"]["requests"][GPU] == str(tp)
            assert f"--tp={tp}" in container["args"]
            assert f"--role={role}" in container["args"]
            assert "--engine=sglang" in container["args"]
            assert "--model=/models/qwen3-32b" in container["args"]
            assert "--ordering=on-time" in container["args"]
            assert "--slicing=whole" in container["args"]
            assert component["podTemplate"]["metadata"]["labels"]["app.kubernetes.io/component"] == role


def test_the_coordinator_has_the_policies_of_the_plan() -> None:
    arguments = main(components(objects_of())["coordinator"])["args"]
    for expected in (
        "--routing=predictive(spread=0.1)",
        "--binding=least-kv",
        "--pools=static",
        "--model=/models/qwen3-32b",
        "--model-name=qwen3-32b",
        "--dyn-tool-call-parser=hermes",
        "--dyn-reasoning-parser=qwen3",
    ):
        assert arguments.count(expected) == 1
    none = objects_of(tool_call_parser=None, reasoning_parser=None)
    assert not [each for each in main(components(none)["coordinator"])["args"] if "parser" in each]


def test_targets_reach_coordinator_and_workers_through_the_graphs_environment() -> None:
    environment = {each["name"]: each.get("value") for each in graph_of(objects_of())["spec"]["env"]}
    assert (environment["AMPD_TTFT"], environment["AMPD_ITL"]) == ("0.35", "0.04")
    names = [each["name"] for each in graph_of(objects_of())["spec"]["env"]]
    base_names = [each["name"] for each in graph_of(base_objects())["spec"]["env"]]
    assert names == base_names  # components patch variables by their place


def test_what_the_user_adds_is_in_all_processes_that_need_it() -> None:
    objects = objects_of(policy_modules="mine", kv_capacity_tokens=5000)
    environment = {each["name"]: each.get("value") for each in graph_of(objects)["spec"]["env"]}
    assert environment["AMPD_POLICY_MODULES"] == "mine"
    for name, component in components(objects).items():
        assert ("--max-total-tokens=5000" in main(component)["args"]) == ("-tp" in name)
    assert "AMPD_POLICY_MODULES" not in str(objects_of())


def test_the_context_and_the_format_of_the_kv_are_those_of_the_plan() -> None:
    objects = components(objects_of(context_tokens=131_072, kv_cache_dtype="fp8_e4m3"))
    assert "--context-length=131072" in main(objects["coordinator"])["args"]
    workers = [main(component)["args"] for name, component in objects.items() if "-tp" in name]
    for arguments in workers:
        assert "--max-context-tokens=131072" in arguments
        (engine,) = (argument for argument in arguments if argument.startswith("--engine-args="))
        assert json.loads(engine.partition("=")[2]) == {"kv_cache_dtype": "fp8_e4m3"}
    assert workers
    assert "context" not in str(main(components(objects_of())["coordinator"])["args"])


def test_the_rest_of_the_base_stays() -> None:
    objects, base = by_identity(objects_of()), by_identity(base_objects())
    assert objects.keys() == base.keys()
    changed = {kind for kind, name in base if objects[kind, name] != base[kind, name]}
    # The StatefulSet has one annotation more.
    assert changed == {"DynamoGraphDeployment", "ConfigMap", "StatefulSet"}
    assert {name for kind, name in base if kind == "ConfigMap" and objects[kind, name] != base[kind, name]} == {
        "ampd-performance-model"
    }
    ours, theirs = components(objects.values()), components(base.values())
    assert ours["frontend"] == theirs["frontend"]
    for name in ("prefill-tp4", "decode-tp8"):
        mine, template = ours[name]["podTemplate"]["spec"], theirs[name.split("-")[0]]["podTemplate"]["spec"]
        assert mine["volumes"] == template["volumes"]
        assert mine["terminationGracePeriodSeconds"] == template["terminationGracePeriodSeconds"]


def test_the_base_is_not_changed() -> None:
    base = base_objects()
    deployment_objects(DEPLOYMENT, base)
    assert base == base_objects()


def test_annotations_come_beside_those_of_the_base() -> None:
    annotations = graph_of(objects_of())["metadata"]["annotations"]
    assert annotations["ampd.dev/rate-sessions-per-second"] == "6"
    assert annotations.items() >= graph_of(base_objects())["metadata"]["annotations"].items()


@pytest.mark.slow
@given(layout=layouts)
def test_gpus_and_replicas_add_up_to_the_layout(layout: Layout) -> None:
    groups = len(layout.prefill) + len(layout.decode)
    if groups + 2 > MOST_COMPONENTS:
        with pytest.raises(UserError, match="components"):
            objects_of(layout=layout)
        return
    workers = {name: component for name, component in components(objects_of(layout=layout)).items() if "-tp" in name}
    assert len(workers) == groups
    gpus = sum(worker["replicas"] * int(main(worker)["resources"]["limits"][GPU]) for worker in workers.values())
    assert gpus == layout.gpus
    for role, side in (("prefill", layout.prefill), ("decode", layout.decode)):
        counts = [worker["replicas"] for worker in workers.values() if worker["type"] == role]
        assert counts == [count for _, count in side]


def test_mixed_workers_are_decode_workers_to_the_base() -> None:
    objects = components(objects_of(layout=Layout(((1, 1),), (), ((2, 3),))))
    mixed, template = objects["mixed-tp2"], components(base_objects())["decode"]
    assert {"--role=mixed", "--tp=2"} <= set(main(mixed)["args"])
    assert (mixed["type"], mixed["replicas"]) == ("decode", 3)
    assert mixed["podTemplate"]["metadata"]["labels"] == template["podTemplate"]["metadata"]["labels"]
    assert "decode" not in objects


def test_more_groups_than_a_graph_may_have_components_are_refused() -> None:
    groups = tuple((tp, 1) for tp in range(1, 13))
    assert len(components(objects_of(layout=Layout(groups, groups[:11])))) == MOST_COMPONENTS
    with pytest.raises(UserError, match=r"makes 26 components, a DynamoGraphDeployment may have 25; .*--degrees"):
        objects_of(layout=Layout(groups, groups))


models = st.one_of(
    st.sampled_from(["qwen3-32b-h20", "tiny-cpu"]).map(load_performance_model),
    st.builds(analytic_model, st.sampled_from(sorted(MODELS)), st.sampled_from(["h200", "b200"])),
)
tokens = st.integers(0, 1_000_000)


@settings(max_examples=30)
@given(model=models, hist=tokens, incr=tokens, batch=st.integers(0, 2000), data=st.data())
def test_the_performance_model_of_the_manifest_gives_the_same_times(
    tmp_path_factory: pytest.TempPathFactory, model: PiecewiseModel, hist: int, incr: int, batch: int, data: Any
) -> None:
    config_map = by_identity(objects_of(profile=model.profile))["ConfigMap", "ampd-performance-model"]
    path = tmp_path_factory.mktemp("perf") / "model.json"
    path.write_text(config_map["data"]["model.json"], encoding="utf-8")
    loaded = load_performance_model(path)
    assert loaded.profile == model.profile
    theta = data.draw(st.sampled_from(model.parallelisms))
    assert loaded.prefill_s(hist, incr, theta) == model.prefill_s(hist, incr, theta)
    assert loaded.decode_step_s(batch, hist, theta) == model.decode_step_s(batch, hist, theta)
    for curve in model.profile.kv_transfers:
        pair = Parallelism(curve.tp_source), Parallelism(curve.tp_target)
        assert loaded.kv_transfer_s(incr, *pair) == model.kv_transfer_s(incr, *pair)


def test_every_process_that_decides_reads_the_performance_model() -> None:
    for name, component in components(objects_of()).items():
        if name == "frontend":
            continue
        environment = {each["name"]: each.get("value") for each in main(component)["env"]}
        pod = component["podTemplate"]["spec"]
        (mount,) = [each for each in main(component)["volumeMounts"] if each["name"] == "performance-model"]
        (volume,) = [each for each in pod["volumes"] if each["name"] == "performance-model"]
        assert volume["configMap"]["name"] == "ampd-performance-model"
        assert environment["AMPD_PERF"] == f"{mount['mountPath']}/model.json"


def configuration(objects: list[Any], name: str) -> str:
    pod = components(objects)[name]["podTemplate"]
    return str(pod["metadata"]["annotations"]["ampd.dev/configuration"])


@pytest.mark.slow
def test_pods_are_replaced_when_the_performance_model_changes() -> None:
    other = analytic_model("qwen3-32b", "h20").profile
    for name in ("coordinator", "prefill-tp2", "decode-tp8"):
        assert configuration(objects_of(), name) == configuration(objects_of(), name)
        assert configuration(objects_of(), name) != configuration(objects_of(profile=other), name)


def test_redis_starts_anew_when_its_configuration_changes() -> None:
    base = base_objects()

    def of_redis() -> str:
        (redis,) = of_kind(deployment_objects(DEPLOYMENT, base), "StatefulSet")
        return str(redis["spec"]["template"]["metadata"]["annotations"]["ampd.dev/configuration"])

    before = of_redis()
    assert of_redis() == before
    by_identity(base)["ConfigMap", "ampd-redis-config"]["data"]["redis.conf"] += "\n"
    assert of_redis() != before


def test_a_replica_like_the_bases_asks_for_what_the_base_asks() -> None:
    worker = components(base_objects())["prefill"]
    assert "--tp=1" in main(worker)["args"]
    assert "--model=/models/qwen3-32b" in main(worker)["args"]
    assert planned.resources(1) == main(worker)["resources"]
    assert f"--kv-store-gib={planned.store_gib(1)}" in main(worker)["args"]
    assert planned.shared_memory(1) == worker["sharedMemorySize"]


def test_the_store_of_the_plan_is_flag_and_memory_of_the_workers() -> None:
    planned, usual = (
        components(objects)["prefill-tp4"] for objects in (objects_of(store_gib_per_gpu=2.5), objects_of())
    )
    assert "--kv-store-gib=10" in main(planned)["args"]
    assert "--kv-store-gib=256" in main(usual)["args"]
    planned_gib, usual_gib = (
        int(main(component)["resources"]["requests"]["memory"].removesuffix("Gi")) for component in (planned, usual)
    )
    assert usual_gib - planned_gib == 246


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_memory_of_a_pod_holds_its_kv_store(tp: int) -> None:
    (worker,) = (each for name, each in components(objects_of(layout=Layout(((tp, 1),), ()))).items() if "-tp" in name)
    (flag,) = (each for each in main(worker)["args"] if each.startswith("--kv-store-gib="))
    store, memory = int(flag.partition("=")[2]), main(worker)["resources"]["requests"]["memory"]
    shared = worker["sharedMemorySize"]
    assert store == 64 * tp
    assert int(memory.removesuffix("Gi")) == store + int(shared.removesuffix("Gi")) + 8 * tp
