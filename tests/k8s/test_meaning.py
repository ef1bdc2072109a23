"""What manifests mean together: references, selectors, the way out, GPUs, images, rights."""

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import ampd
from ampd.settings import parse_settings
from ampd.telemetry.metrics.exposition import LIVENESS_PATH
from tests.k8s.pods import COMPONENT, Pod, command_line, environment, pods, selects
from tests.k8s.rendering import (
    ALL,
    GRAPHS,
    K8S,
    for_each,
    graph_of,
    kustomize_together,
    named,
    needs_kubectl,
    rendered,
)
from tests.k8s.test_commands import model_of

pytestmark = needs_kubectl

PART_OF = ("app.kubernetes.io/part-of", "ampd")
USER_PROVIDED = {
    ("Secret", "ampd-redis"),
    ("Secret", "ampd-graph"),
    ("Secret", "ampd-redis-tls"),
    ("Secret", "ampd-hugging-face"),
    ("PersistentVolumeClaim", "ampd-models"),
}
"""What the user makes, and the documentation says how."""
OF_THE_OPERATOR = {"nvidia.com/metrics-enabled": "true"}
"""What Dynamo's operator puts on a graph's pods by itself."""

# -- references


def references(pod: Pod) -> set[tuple[str, str]]:
    """(kind, name) of everything that a pod needs to start."""
    found = set()
    for volume in pod.spec.get("volumes", []):
        if "configMap" in volume:
            found.add(("ConfigMap", volume["configMap"]["name"]))
        if "secret" in volume:
            found.add(("Secret", volume["secret"]["secretName"]))
        if "persistentVolumeClaim" in volume:
            found.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
    for container in pod.containers():
        for entry in [*pod.shared_env, *container.get("env", [])]:
            source = entry.get("valueFrom", {})
            if "secretKeyRef" in source:
                found.add(("Secret", source["secretKeyRef"]["name"]))
            if "configMapKeyRef" in source:
                found.add(("ConfigMap", source["configMapKeyRef"]["name"]))
        found |= {("ConfigMap", source["configMapRef"]["name"]) for source in container.get("envFrom", [])}
    return found


@for_each(ALL)
def test_every_reference_leads_somewhere(name: str) -> None:
    documents = rendered(name)
    made = {(each["kind"], each["metadata"]["name"]) for each in documents}
    for pod in pods(documents):
        assert references(pod) - made - USER_PROVIDED == set(), pod.name


def missing_keys(documents: Any) -> set[tuple[str, str, str]]:
    """(kind, name, key) that a pod refers to and that the object, which is one of the documents, does not have."""
    made = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    wanted: set[tuple[str, str, str]] = set()
    for pod in pods(documents):
        for volume in pod.spec.get("volumes", []):
            for kind, source in (("ConfigMap", volume.get("configMap", {})), ("Secret", volume.get("secret", {}))):
                name = source.get("name", source.get("secretName"))
                wanted |= {(kind, name, item["key"]) for item in source.get("items", [])}
        for container in pod.containers():
            for entry in [*pod.shared_env, *container.get("env", [])]:
                for kind, field in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
                    if reference := entry.get("valueFrom", {}).get(field):
                        wanted.add((kind, reference["name"], reference["key"]))
    return {
        (kind, name, key)
        for kind, name, key in wanted
        if (kind, name) in made and not any(key in made[kind, name].get(part, {}) for part in ("data", "stringData"))
    }


@for_each(ALL)
def test_every_key_that_a_pod_refers_to_is_there(name: str) -> None:
    assert missing_keys(rendered(name)) == set()


def test_a_missing_key_is_found(tmp_path: Path) -> None:
    """The one combination that the documentation excludes: the Secret of `no-gpu` has no URL."""
    documents = kustomize_together(tmp_path, ["overlays/no-gpu"], components=["components/external-redis"])
    assert missing_keys(documents) == {("Secret", "ampd-redis", "url")}


def test_what_the_user_provides_is_documented() -> None:
    texts = [path.read_text() for path in (*K8S.glob("*.md"), *K8S.rglob("kustomization.yaml"), *K8S.rglob("*.yaml"))]
    for _, name in USER_PROVIDED:
        assert any(name in text for text in texts)
    readme = (K8S / "README.md").read_text()
    assert "kubectl create secret generic ampd-redis --from-literal=password=" in readme
    assert "kubectl create secret generic ampd-graph --from-literal=secret=" in readme
    assert "ampd-models" in readme


@for_each(ALL)
def test_every_mount_has_its_volume_and_every_volume_is_mounted(name: str) -> None:
    for pod in pods(rendered(name)):
        volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
        mounted = {mount["name"] for container in pod.containers() for mount in container.get("volumeMounts", [])}
        assert volumes == mounted, pod.name


@for_each(GRAPHS)
def test_files_that_processes_name_are_mounted(name: str) -> None:
    documents = rendered(name)
    for pod in pods(documents):
        for container in pod.containers():
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            values = [*command_line(pod, container, documents), *environment(pod, container, documents).values()]
            for path in re.findall(r"(?:^|=)(/[a-z][\w/.-]*)", "\n".join(values), re.MULTILINE):
                assert any(path == mount or path.startswith(f"{mount}/") for mount in mounts), (pod.name, path)


@for_each(GRAPHS)
def test_the_performance_model_covers_the_workers(name: str, tmp_path: Path) -> None:
    from ampd.perf.presets import load_performance_model
    from ampd.types import Parallelism

    documents = rendered(name)
    (tmp_path / "model.json").write_text(named(documents, "ConfigMap", "ampd-performance-model")["data"]["model.json"])
    model = load_performance_model(tmp_path / "model.json")
    by_role: dict[str, list[Parallelism]] = {"prefill": [], "decode": []}
    for pod in pods(documents):
        if pod.labels[COMPONENT] in by_role:
            by_role[pod.labels[COMPONENT]].append(Parallelism(tp=tp_of(pod, documents)))
    model.require(by_role["prefill"], by_role["decode"])


def test_the_performance_model_is_the_shipped_one() -> None:
    shipped = Path(ampd.__file__).parent / "perf" / "profiles" / "qwen3-32b-h20.json"
    assert (K8S / "base" / "performance-model.json").read_bytes() == shipped.read_bytes()


# -- labels and selectors


@for_each(ALL)
def test_every_object_and_pod_says_that_it_is_part_of_ampd(name: str) -> None:
    key, value = PART_OF
    for each in rendered(name):
        assert each["metadata"].get("labels", {}).get(key) == value, each["metadata"]["name"]
    assert all(pod.labels[key] == value for pod in pods(rendered(name)))


@for_each(GRAPHS)
def test_selectors_select_pods(name: str) -> None:
    documents = rendered(name)
    everyone = pods(documents)
    for each in documents:
        spec, kind = each.get("spec", {}), each["kind"]
        if kind in ("PodDisruptionBudget", "PodMonitor", "StatefulSet"):
            selector = spec["selector"]
        elif kind == "NetworkPolicy":
            selector = spec["podSelector"]
        elif kind == "Service":
            selector = {"matchLabels": spec["selector"]}
        else:
            continue
        selected = [pod for pod in everyone if selects(selector, {**pod.labels, **OF_THE_OPERATOR})]
        assert selected, f"{kind} {each['metadata']['name']} selects nothing"
        if kind == "PodDisruptionBudget" and "minAvailable" in spec:
            assert all(spec["minAvailable"] < pod.replicas for pod in selected), "no node could ever be drained"
        named_ports = [endpoint["port"] for endpoint in spec.get("podMetricsEndpoints", [])]
        named_ports += [port["targetPort"] for port in spec.get("ports", []) if kind == "Service"]
        for port in named_ports:
            assert any(has_port(pod, port) for pod in selected), f"{each['metadata']['name']}: nobody has {port}"


def has_port(pod: Pod, name: str) -> bool:
    return any(port["name"] == name for port in pod.main.get("ports", []))


# -- probes and the way out


@for_each(GRAPHS)
def test_probes_ask_ports_that_are_there_and_give_time(name: str) -> None:
    documents = rendered(name)
    for pod in pods(documents):
        numbers = {port["name"]: str(port["containerPort"]) for port in pod.main["ports"]}
        if pod.name == "frontend":
            assert f"--http-port={numbers['http']}" in pod.main["args"]
        elif pod.is_graph():
            assert environment(pod, pod.main, documents)["DYN_SYSTEM_PORT"] == numbers["system"]
        for kind in ("readinessProbe", "livenessProbe", *(["startupProbe"] if pod.is_graph() else [])):
            probe = pod.main[kind]
            assert probe["timeoutSeconds"] <= probe["periodSeconds"]
            if "httpGet" in probe:
                assert has_port(pod, probe["httpGet"]["port"])
                assert probe["httpGet"]["path"] == _path_of(kind, pod)
        patience_s = pod.main["livenessProbe"]["periodSeconds"] * pod.main["livenessProbe"]["failureThreshold"]
        assert patience_s >= 30, "a busy process is not a dead one"
        if "workers" in pod.main["command"]:
            startup = pod.main["startupProbe"]
            assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600, "models load for long"


def _path_of(kind: str, pod: Pod) -> str:
    if kind == "readinessProbe":
        return "/health"
    # Dynamo's threads do all the work of a frontend. What hangs in the other processes is their event loop.
    return LIVENESS_PATH if kind == "livenessProbe" and pod.name != "frontend" else "/live"


@for_each(GRAPHS)
def test_pods_get_the_time_that_they_need_to_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = rendered(name)
    for pod in pods(documents):
        if not pod.is_graph():
            continue
        variables = environment(pod, pod.main, documents)
        if pod.name == "frontend":
            needed_s = int(variables["DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS"])
        else:
            with monkeypatch.context() as patch:
                for variable, value in variables.items():
                    patch.setenv(variable, value)
                argv = command_line(pod, pod.main, documents)
                settings: Any = parse_settings(model_of(argv), argv[3:], argv[2])
            needed_s = settings.grace_s + settings.drain_s
        assert pod.spec["terminationGracePeriodSeconds"] >= needed_s + 15, pod.name


# -- GPUs, images, versions


def tp_of(pod: Pod, documents: Any) -> int:
    (flag,) = (word for word in command_line(pod, pod.main, documents) if word.startswith("--tp="))
    return int(flag.removeprefix("--tp="))


@for_each(GRAPHS)
def test_a_worker_gets_as_many_gpus_as_its_parallelism(name: str) -> None:
    documents = rendered(name)
    for pod in pods(documents):
        for container in pod.containers():
            resources = container["resources"]
            gpus = int(resources["limits"].get("nvidia.com/gpu", 0))
            assert gpus == int(resources["requests"].get("nvidia.com/gpu", 0))
            is_worker = "--engine=sglang" in container.get("args", [])
            assert gpus == (tp_of(pod, documents) if is_worker else 0), pod.name
            assert {"cpu", "memory"} <= resources["requests"].keys()
            assert "memory" in resources["limits"]


@for_each(GRAPHS)
def test_what_is_shipped_starts_with_the_engine_as_it_is(name: str) -> None:
    """SGLang workers of several GPUs are refused at their start (a plan that has some says so when it is written)."""
    documents = rendered(name)
    for pod in pods(documents):
        if "--engine=sglang" in pod.main.get("args", []):
            assert tp_of(pod, documents) == 1, pod.name


@for_each(GRAPHS)
def test_rdma_is_for_workers_only_and_only_with_its_component(name: str) -> None:
    for pod in pods(rendered(name)):
        expected = pod.labels[COMPONENT] in ("prefill", "decode") and ("rdma" in name or "multi-node" in name)
        assert ("rdma/ib" in pod.main["resources"]["limits"]) == expected
        assert ("add" in pod.main["securityContext"]["capabilities"]) == expected


@for_each(ALL)
def test_images_are_pinned(name: str) -> None:
    for pod in pods(rendered(name)):
        for container in pod.containers():
            image, separator, tag = container["image"].rpartition(":")
            assert separator
            assert tag != "latest"
            assert re.match(r"\d+\.\d+\.\d+", tag)
            if image == "ampd":
                assert tag.partition("-")[0] == importlib.metadata.version("ampd")


def test_the_documented_overlay_pins_every_image_by_digest(tmp_path: Path) -> None:
    """The example of the README, with digests in place of its words."""
    section = (K8S / "README.md").read_text().partition("## Images by digest")[2].partition("\n## ")[0]
    lines = re.search(r"(?m)^    images:\n(?:      .*\n)+", section)
    assert lines is not None
    images = yaml.safe_load(lines[0].replace("DIGEST", "0" * 64))["images"]
    for resource in ("overlays/single-node", "overlays/no-gpu", "doctor", "models"):
        folder = tmp_path / resource
        documents = kustomize_together(folder, [resource], images=images)
        found = [container["image"] for pod in pods(documents) for container in pod.containers()]
        assert [image for image in found if not re.search(r"@sha256:[0-9a-f]{64}$", image)] == []


@for_each(GRAPHS)
def test_the_operator_is_told_dynamos_version(name: str) -> None:
    """It would take the image's tag for it, which is ours."""
    for component in graph_of(rendered(name))["spec"]["components"]:
        assert component["runtimeVersionOverride"] == importlib.metadata.version("ai-dynamo")
        assert component["type"]


# -- rights


@for_each(ALL)
def test_pods_have_no_more_rights_than_they_need(name: str) -> None:
    for pod in pods(rendered(name)):
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"]
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & pod.spec.keys()
        for container in pod.containers():
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"]["drop"] == ["ALL"]
            assert set(own["capabilities"].get("add", [])) <= {"IPC_LOCK"}
            if container in pod.spec["containers"] and pod.is_graph():
                (models,) = (mount for mount in container["volumeMounts"] if mount["name"] == "models")
                assert models["readOnly"] is True


@for_each(ALL)
def test_no_password_is_written_down(name: str) -> None:
    documents = rendered(name)
    if "no-gpu" not in name:
        assert not [each for each in documents if each["kind"] == "Secret"]
    # Every URL with a user takes the password from a variable.
    assert set(re.findall(r"://\w+:([^@]+)@", json.dumps(documents))) <= {"$(AMPD_REDIS_PASSWORD)"}


@for_each(GRAPHS)
def test_the_frontend_has_no_way_to_redis(name: str) -> None:
    documents = rendered(name)
    for pod in pods(documents):
        has_secret = any(kind == "Secret" and "redis" in each for kind, each in references(pod))
        assert has_secret == (pod.name != "frontend"), pod.name


@for_each([each for each in GRAPHS if "external" not in each])
def test_redis_gives_rights_for_the_namespace_of_the_graph(name: str) -> None:
    documents = rendered(name)
    (config,) = (each for each in documents if each["metadata"]["name"].startswith("ampd-redis-config"))
    (namespace,) = (each["value"] for each in graph_of(documents)["spec"]["env"] if each["name"] == "DYN_NAMESPACE")
    keys, channels = re.findall(r"[~&](\S+)", config["data"]["users.acl"])
    assert keys == channels == f"ampd:{{{namespace}}}:*"
