"""Which pods the network policies let call each other, and what protects those calls."""

from pathlib import Path
from typing import Any

import pytest

from ampd.cli.serve.graph import FRONTEND_ENVIRONMENT
from tests.k8s.pods import COMPONENT, INSTANCE, Pod, environment, pods, selects
from tests.k8s.rendering import ALL, GRAPHS, for_each, named, needs_kubectl, rendered

pytestmark = needs_kubectl


def allowed(documents: Any, source: dict[str, str], target: str, port: str, namespace: str = "graph") -> bool:
    """Whether the network policies let a pod with labels `source` in `namespace` call a pod of ours."""
    (pod,) = (each for each in pods(documents) if each.name == target)
    policies = [each["spec"] for each in documents if each["kind"] == "NetworkPolicy"]
    applying = [spec for spec in policies if selects(spec["podSelector"], pod.labels)]
    if not applying:
        return True
    for rule in (rule for spec in applying for rule in spec.get("ingress", [])):
        if not any(each["port"] == port for each in rule.get("ports", [])) and "ports" in rule:
            continue
        if "from" not in rule:
            return True
        for peer in rule["from"]:
            here = {"kubernetes.io/metadata.name": namespace}
            in_namespace = (
                selects(peer["namespaceSelector"], here) if "namespaceSelector" in peer else namespace == "graph"
            )
            if in_namespace and selects(peer.get("podSelector", {}), source):
                return True
    return False


@for_each(GRAPHS)
def test_only_the_graph_talks_to_redis_and_to_the_workers(name: str) -> None:
    documents = rendered(name)
    of = {pod.labels[COMPONENT]: dict(pod.labels) for pod in pods(documents)}
    stranger = {"app": "shop"}
    any_port = "45678"
    if "redis" in of:
        for role in ("coordinator", "prefill", "decode"):
            assert allowed(documents, of[role], "ampd-redis", "redis")
            assert not allowed(documents, of[role], "ampd-redis", "redis", namespace="other")
        assert not allowed(documents, of["frontend"], "ampd-redis", "redis")
        assert not allowed(documents, stranger, "ampd-redis", "redis")
        policy = named(documents, "NetworkPolicy", "ampd-redis")["spec"]
        assert "Egress" in policy["policyTypes"]
        assert not policy.get("egress")
    for target in ("coordinator", "prefill", "decode"):
        for role in ("coordinator", "prefill", "decode"):
            assert allowed(documents, of[role], target, any_port)
        # Frontends read what anybody sends, so no worker takes calls from them.
        for port in (any_port, "system"):
            assert allowed(documents, of["frontend"], target, port) == (target == "coordinator")
        assert not allowed(documents, stranger, target, any_port)
        assert not allowed(documents, stranger, target, "system")
        assert not allowed(documents, of["decode"], target, any_port, namespace="other")
        assert allowed(documents, stranger, target, "system", namespace="monitoring")
        assert not allowed(documents, stranger, target, any_port, namespace="monitoring")
    is_public = "public-route" in name
    assert allowed(documents, stranger, "frontend", "http", namespace="other") != is_public
    assert not allowed(documents, stranger, "frontend", any_port)
    assert allowed(documents, of["coordinator"], "frontend", any_port), "answers of coordinators"
    assert not allowed(documents, of["decode"], "frontend", any_port)


@for_each(GRAPHS)
def test_two_graphs_of_one_kubernetes_namespace_stay_apart(name: str) -> None:
    documents = rendered(name)
    for pod in pods(documents):
        assert pod.labels[INSTANCE] == "ampd"
        neighbour = {**pod.labels, INSTANCE: "another-graph"}
        for target in pods(documents):
            for port in ("45678", "redis", "system"):
                assert not allowed(documents, neighbour, target.name, port), (pod.name, target.name, port)
            assert selects(named(documents, "NetworkPolicy", "ampd-default-deny")["spec"]["podSelector"], target.labels)
        assert not [
            each["metadata"]["name"]
            for each in documents
            if each["kind"] == "NetworkPolicy" and selects(each["spec"]["podSelector"], neighbour)
        ]


def may_call(documents: Any, source: Pod, target: dict[str, str] | None, port: str | int) -> bool:
    """Whether the network policies let a pod of ours call one of this namespace (None: an address anywhere)."""
    policies = [each["spec"] for each in documents if each["kind"] == "NetworkPolicy"]
    applying = [spec for spec in policies if selects(spec["podSelector"], source.labels)]
    rules = [rule for spec in applying for rule in spec.get("egress", [])]
    if not any("Egress" in spec["policyTypes"] for spec in applying):
        return True
    return any(
        any(each["port"] == port for each in rule.get("ports", [{"port": port}]))
        and ("to" not in rule or (target is not None and any(selects(to["podSelector"], target) for to in rule["to"])))
        for rule in rules
    )


CALLS = {
    "frontend": {"coordinator"},
    "coordinator": {"frontend", "coordinator", "prefill", "decode"},
    "prefill": {"coordinator", "prefill", "decode"},
    "decode": {"coordinator", "prefill", "decode"},
    "redis": set(),
}
"""The components that each component may call, at any port."""


@for_each(GRAPHS)
def test_pods_call_only_the_components_that_they_need(name: str) -> None:
    documents = rendered(name)
    of = {pod.labels[COMPONENT]: pod for pod in pods(documents)}
    has_own_redis = "redis" in of
    for source, pod in of.items():
        for target, other in of.items():
            assert may_call(documents, pod, dict(other.labels), 45678) == (target in CALLS[source]), (source, target)
            neighbour = {**other.labels, INSTANCE: "another-graph"}
            assert not may_call(documents, pod, neighbour, 45678), (source, target)
        assert not may_call(documents, pod, None, 80)
        # Names and the API server have no address that these files could know.
        for port in (53, 443, 6443):
            assert may_call(documents, pod, None, port) == (source != "redis"), (source, port)
        needs_redis = source in ("coordinator", "prefill", "decode")
        if has_own_redis:
            assert may_call(documents, pod, dict(of["redis"].labels), "redis") == needs_redis
        assert may_call(documents, pod, None, 6379) == (needs_redis and not has_own_redis)


def test_the_doctor_reaches_redis_and_no_api_server() -> None:
    (job,) = pods(rendered("doctor"))
    documents = rendered("base")
    (redis,) = (pod for pod in pods(documents) if pod.name == "ampd-redis")
    assert may_call(documents, job, dict(redis.labels), "redis")
    assert allowed(documents, dict(job.labels), "ampd-redis", "redis")
    assert may_call(documents, job, None, 53)
    assert not may_call(documents, job, None, 443)


@for_each(ALL)
def test_only_pods_that_discover_others_have_a_token(name: str) -> None:
    for pod in pods(rendered(name)):
        assert pod.spec.get("automountServiceAccountToken", True) == pod.is_graph(), pod.name


@pytest.mark.slow
def test_the_public_route_passes_on_the_api_and_nothing_else() -> None:
    documents = rendered("base+public-route")
    (rule,) = named(documents, "Ingress", "ampd")["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert (path["path"], path["pathType"]) == ("/v1", "Prefix")
    (frontend,) = (pod for pod in pods(documents) if pod.name == "frontend")
    (port,) = (each["containerPort"] for each in frontend.main["ports"] if each["name"] == "http")
    assert path["backend"]["service"] == {"name": "ampd-frontend", "port": {"number": port}}
    for namespace in ("ingress-nginx", "monitoring"):
        assert allowed(documents, {}, "frontend", "http", namespace=namespace)
    assert not allowed(documents, {"app": "shop"}, "frontend", "http")
    limit = environment(frontend, frontend.main, documents)["DYN_HTTP_BODY_LIMIT_MB"]
    annotations = named(documents, "Ingress", "ampd")["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/proxy-body-size"] == f"{limit}m"


@for_each(GRAPHS)
def test_frontends_take_no_administration_and_no_endless_bodies(name: str) -> None:
    documents = rendered(name)
    (frontend,) = (pod for pod in pods(documents) if pod.name == "frontend")
    variables = environment(frontend, frontend.main, documents)
    assert FRONTEND_ENVIRONMENT["DYN_DISABLE_FRONTEND_ADMIN_API"] == "1"
    assert variables.items() >= FRONTEND_ENVIRONMENT.items(), "as `ampd serve` starts its frontend"
    assert 1 <= int(variables["DYN_HTTP_BODY_LIMIT_MB"]) <= 8


@for_each(GRAPHS)
def test_coordinators_and_workers_sign_their_calls_and_frontends_have_no_secret(name: str) -> None:
    documents = rendered(name)
    for pod in (each for each in pods(documents) if each.is_graph()):
        path = environment(pod, pod.main, documents).get("AMPD_GRAPH_SECRET_FILE")
        mounted = {mount["mountPath"] for mount in pod.main["volumeMounts"] if mount["name"] == "graph-secret"}
        assert (path is None) == (pod.name == "frontend")
        assert mounted == ({str(Path(path).parent)} if path else set())
