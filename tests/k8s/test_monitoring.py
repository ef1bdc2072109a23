"""Dashboard, alerts and scraping: every panel and every alert asks for what exists, and every process is scraped."""

import copy
import json
import re
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from ampd.telemetry.metrics.names import METRICS
from tests.k8s.monitoring_schema import monitoring_problems
from tests.k8s.pods import Pod, pods
from tests.k8s.promql_check import PromqlError, label_names, metrics_of, result_labels
from tests.k8s.rendering import K8S, Document, graph_of, kustomize_together, named, needs_kubectl

MONITORING = K8S / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [
    rule
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["spec"]["groups"]
    for rule in group["rules"]
]
OPERATIONS = K8S.parent / "docs" / "operations.md"
FOR_NO_PANEL = {
    *("ampd_coordinator_info", "ampd_worker_info", "ampd_worker_role", "ampd_worker_calls_refused_total"),
    *("ampd_rounds_handed_on", "ampd_time_factor"),
}
"""Facts to look up and to join with; `ampd_live_workers` shows the roles. Refused calls are 0 in a healthy graph."""

# Labels that Dynamo's operator puts on every pod of a graph.
FROM_THE_OPERATOR = {"nvidia.com/metrics-enabled": "true"}


def titles(panel: dict[str, Any]) -> str:
    return str(panel["title"])


def alert(rule: dict[str, Any]) -> str:
    return f"{rule['alert']}-{rule['labels']['severity']}"


def plain(expression: str) -> str:
    """PromQL, once Grafana has filled in its variables."""
    filled = expression.replace("$__rate_interval", "1m").replace("$__range", "1h")
    for variable in ("$namespace", "$dynamo_namespace"):
        filled = filled.replace(f"{variable}|", ".*").replace(variable, ".*")
    assert "$" not in filled, filled
    return filled


# -- the dashboard


@pytest.mark.parametrize("panel", PANELS, ids=titles)
def test_panels_ask_for_what_exists(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        labels = result_labels(plain(target["expr"]))
        assert label_names(target["legendFormat"]) <= labels, target


@pytest.mark.parametrize("panel", PANELS, ids=titles)
def test_panels_say_what_they_show(panel: dict[str, Any]) -> None:
    assert len(panel["description"].split()) >= 5
    assert panel["fieldConfig"]["defaults"]["unit"]
    names = [target["legendFormat"] for target in panel["targets"]]
    assert len(set(names)) == len(names)
    assert len({target["refId"] for target in panel["targets"]}) == len(names)
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"]["options"] not in names:
            assert any("{{" in name for name in names), override


@pytest.mark.parametrize("panel", PANELS, ids=titles)
def test_panels_follow_the_variables(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        selectors = re.findall(r"\{([^{}]*)\}", target["expr"])
        assert selectors
        for selector in selectors:
            assert 'namespace=~"$namespace' in selector
            if "alertname" not in selector:
                assert 'job="ampd"' in selector
        ours = any(name.startswith("ampd_") for name in metrics_of(plain(target["expr"])))
        assert ("$dynamo_namespace" in target["expr"]) == ours


def test_variables_ask_for_what_exists() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "namespace", "dynamo_namespace"]
    for name in ("namespace", "dynamo_namespace"):
        query = variables[name]["query"]["query"]
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert match
        assert match[2] == name
        assert name in result_labels(plain(match[1]))


def test_panels_lie_side_by_side() -> None:
    taken: Counter[tuple[int, int]] = Counter()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] <= place["x"] + place["w"] <= 24
        taken.update(
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        )
    assert set(taken.values()) == {1}
    height = max(y for _, y in taken) + 1
    assert len(taken) == 24 * height, "gaps"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_metric_is_on_a_panel() -> None:
    shown = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    hidden = {metric.name for metric in METRICS if not re.search(rf"\b{metric.name}(_bucket|_sum|_count)?\b", shown)}
    assert hidden == FOR_NO_PANEL


# -- the alerts


@pytest.mark.parametrize("rule", RULES, ids=alert)
def test_alerts_ask_for_what_exists(rule: dict[str, Any]) -> None:
    labels = result_labels(rule["expr"])
    for text in rule["annotations"].values():
        assert label_names(text) <= labels, text
    assert set(re.findall(r"\w+(?=\{[^{}]*\})", rule["expr"])) == metrics_of(rule["expr"])
    assert rule["expr"].count('job="ampd"') == rule["expr"].count("{"), "only what our PodMonitor scrapes, and once"


@pytest.mark.parametrize("rule", RULES, ids=alert)
def test_alerts_say_what_to_do(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"Ampd[A-Z]\w+", rule["alert"])
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert re.fullmatch(r"\d+m", rule["for"])
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert (page, anchor) == ("docs/operations.md", rule["alert"].lower())


def test_the_operations_page_explains_every_alert_and_no_other() -> None:
    headings = re.findall(r"^#+ +(Ampd\w+)\s*$", OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted({rule["alert"] for rule in RULES})


def test_every_alert_has_a_name_of_its_own() -> None:
    assert len({alert(rule) for rule in RULES}) == len(RULES)


# -- the check itself


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("sum(rate(ampd_rounds[1m]))", "no metric"),
        ("rate(ampd_time_to_first_token_seconds[1m])", "is a histogram"),
        ("sum(ampd_rounds_total)", "is a counter"),
        ("rate(ampd_live_workers[1m])", "of a gauge"),
        ('rate(ampd_rounds_total{outcome="fine"}[1m])', "never 'fine'"),
        ('rate(ampd_rounds_total{outcome=~"met|fine"}[1m])', "never 'fine'"),
        ('rate(ampd_rounds_total{role="decode"}[1m])', "no label role"),
        ("sum by (role) (rate(ampd_rounds_total[1m]))", "no labels of what is aggregated"),
        ("histogram_quantile(0.5, sum by (route) (rate(ampd_time_to_first_token_seconds_bucket[1m])))", "label le"),
        ("sum by (role) (ampd_live_workers) / sum(ampd_live_workers)", "never match"),
        ("ampd_live_workers * on (outcome) ampd_state_available", "not on both sides"),
        ("dynamo_frontend_requests > 1", "no metric"),
    ],
)
def test_the_check_sees(expression: str, complaint: str) -> None:
    with pytest.raises(PromqlError, match=complaint):
        result_labels(expression)


# -- rendered


@cache
def monitored() -> tuple[Document, ...]:
    with tempfile.TemporaryDirectory() as folder:
        return tuple(kustomize_together(Path(folder), ["base"], components=["monitoring"]))


@needs_kubectl
def test_every_process_of_the_graph_is_scraped_once() -> None:
    monitor = named(monitored(), "PodMonitor", "ampd")["spec"]
    assert graph_of(monitored())["metadata"].get("annotations", {}).get("nvidia.com/enable-metrics", "true") == "true"
    scraped = {}
    for pod in pods(monitored()):
        labels = {**pod.labels, **(FROM_THE_OPERATOR if pod.is_graph() else {})}
        if monitor["selector"]["matchLabels"].items() <= labels.items():
            ports = {port["name"] for container in pod.containers() for port in container.get("ports", [])}
            scraped[pod.name] = [each["port"] for each in monitor["podMetricsEndpoints"] if each["port"] in ports]
            assert labels[monitor["jobLabel"]] == "ampd"
    assert scraped == {"frontend": ["http"], "coordinator": ["system"], "prefill": ["system"], "decode": ["system"]}


@needs_kubectl
def test_targets_carry_their_component() -> None:
    labels = {pod.name: component_of(pod) for pod in pods(monitored()) if pod.is_graph()}
    assert labels == {name: name for name in labels}
    for endpoint in named(monitored(), "PodMonitor", "ampd")["spec"]["podMetricsEndpoints"]:
        (relabeling,) = endpoint["relabelings"]
        assert relabeling["sourceLabels"] == ["__meta_kubernetes_pod_label_app_kubernetes_io_component"]
        assert relabeling["targetLabel"] == "component"


def component_of(pod: Pod) -> str:
    return pod.labels["app.kubernetes.io/component"]


@needs_kubectl
def test_grafana_finds_the_dashboard() -> None:
    config = named(monitored(), "ConfigMap", "ampd-dashboard")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config["data"]["ampd.json"]) == DASHBOARD
    # `kubectl apply` keeps a copy in an annotation, of which an object may have 256 KiB.
    assert len(json.dumps(config)) < 200_000


@needs_kubectl
def test_the_alerts_are_deployed() -> None:
    groups = named(monitored(), "PrometheusRule", "ampd")["spec"]["groups"]
    assert [rule for group in groups for rule in group["rules"]] == RULES


@needs_kubectl
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0, "honourLabels")),
        ("PodMonitor", ("spec", "selector", "matchLabel")),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "annotation")),
    ],
)
def test_a_misspelt_field_is_found(kind: str, way: tuple[str | int, ...]) -> None:
    document = copy.deepcopy(named(monitored(), kind, "ampd"))
    assert monitoring_problems(document) == []
    place: Any = document
    for step in way[:-1]:
        place = place[step]
    place[way[-1]] = True
    assert monitoring_problems(document)
