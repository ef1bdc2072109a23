"""Whether a PromQL expression can work: its metrics exist, with the labels and kinds that it takes them to have."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import promql_parser as promql

from ampd.telemetry.metrics.names import Kind, Metric
from tests.ampd.telemetry.metrics.registry_lab import by_name

DYNAMO_LABELS = frozenset(
    {"dynamo_namespace", "dynamo_component", "dynamo_endpoint", "worker_id", "model", "model_name"}
)
"""What Dynamo adds to every metric of ours."""

TARGET_LABELS = frozenset({"job", "instance", "namespace", "pod", "container", "component"})
"""What Prometheus and our PodMonitor add to everything that is scraped."""


@dataclass(frozen=True)
class Known:
    """What an expression may take for granted of a metric.

    Attributes:
        values: label -> its possible values, for the labels whose values are known.
    """

    kind: Kind
    labels: frozenset[str]
    values: Mapping[str, tuple[str, ...]]


DYNAMO_METRICS: dict[str, Known] = {
    name: Known(kind, frozenset(labels), {})
    for name, kind, labels in (
        ("dynamo_frontend_requests_total", Kind.COUNTER, ("endpoint", "error_type", "model", "request_type", "status")),
        ("dynamo_frontend_inflight_requests", Kind.GAUGE, ("model",)),
        ("dynamo_frontend_queued_requests", Kind.GAUGE, ("model",)),
        ("dynamo_frontend_time_to_first_token_seconds", Kind.HISTOGRAM, ("model",)),
        ("dynamo_frontend_request_duration_seconds", Kind.HISTOGRAM, ("model",)),
    )
}
"""Of Dynamo's frontend, what dashboard and alerts use; a slow test compares it with a frontend that runs."""

_PROMETHEUS_METRICS = {
    "up": Known(Kind.GAUGE, frozenset(), {}),
    "ALERTS": Known(Kind.GAUGE, frozenset({"alertname", "alertstate", "severity", "dynamo_namespace"}), {}),
}
_OVER_COUNTERS = {"rate", "increase", "irate"}
_OVER_GAUGES = {"max_over_time", "min_over_time", "avg_over_time"}
_SET_OPERATORS = {"and", "or", "unless"}


class PromqlError(AssertionError):
    """The expression asks for something that does not exist."""


def metrics_of(expression: str) -> set[str]:
    """The metrics that an expression reads, as they are written."""
    found: set[str] = set()

    def visit(node: promql.Expr) -> None:
        if isinstance(node, promql.VectorSelector) and node.name:
            found.add(node.name)
        if isinstance(node, promql.MatrixSelector) and node.vector_selector.name:
            found.add(node.vector_selector.name)

    promql.walk(promql.parse(expression), visit)
    return found


def result_labels(expression: str) -> frozenset[str]:
    """Labels that the result's series may have.

    Raises:
        PromqlError: a metric, a label, a label's value or a kind is wrong.
    """
    return _labels(promql.parse(expression))


def _labels(node: promql.Expr) -> frozenset[str]:
    if isinstance(node, promql.NumberLiteral | promql.StringLiteral):
        return frozenset()
    if isinstance(node, promql.ParenExpr | promql.UnaryExpr):
        return _labels(node.expr)
    if isinstance(node, promql.VectorSelector):
        known = _selected(node)
        _require(known.kind is not Kind.COUNTER, f"{node.name} is a counter: its bare value says nothing")
        return known.labels
    if isinstance(node, promql.AggregateExpr):
        return _aggregated(node)
    if isinstance(node, promql.Call):
        return _called(node)
    if isinstance(node, promql.BinaryExpr):
        return _combined(node)
    raise PromqlError(f"{node}: not understood here")


def _selected(selector: promql.VectorSelector) -> Known:
    """The metric of a selector; what it is matched with is checked."""
    _require(selector.name is not None, f"{selector}: name the metric")
    known = _known(str(selector.name))
    for matcher in selector.matchers.matchers:
        _require(matcher.name in known.labels, f"{selector.name} has no label {matcher.name}")
        values = known.values.get(matcher.name, ())
        # A regular expression names values one by one here, so that each can be checked.
        words = matcher.value.split("|") if matcher.op in (promql.MatchOp.Re, promql.MatchOp.NotRe) else [matcher.value]
        for word in words if values else ():
            _require(word in values, f"{selector.name}: {matcher.name} is never {word!r}")
    return known


def _known(name: str) -> Known:
    if name in _PROMETHEUS_METRICS:
        metric = _PROMETHEUS_METRICS[name]
        return Known(metric.kind, metric.labels | TARGET_LABELS, metric.values)
    family = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
    dynamo = DYNAMO_METRICS.get(name) or DYNAMO_METRICS.get(family)
    if dynamo is not None:
        return Known(_kind(dynamo.kind, name, name in DYNAMO_METRICS), dynamo.labels | TARGET_LABELS | _le(name), {})
    ours = by_name(name)
    _require(ours is not None, f"there is no metric {name}")
    assert isinstance(ours, Metric)
    labels = frozenset(ours.labels) | DYNAMO_LABELS | TARGET_LABELS | _le(name)
    return Known(_kind(ours.kind, name, name == ours.name), labels, ours.labels)


def _kind(kind: Kind, name: str, is_whole: bool) -> Kind:
    """Parts of a histogram are counters; the histogram itself has no series."""
    _require(not (kind is Kind.HISTOGRAM and is_whole), f"{name} is a histogram: ask for its _bucket, _sum or _count")
    return Kind.COUNTER if kind is Kind.HISTOGRAM else kind


def _le(name: str) -> frozenset[str]:
    return frozenset({"le"}) if name.endswith("_bucket") else frozenset()


def _aggregated(node: promql.AggregateExpr) -> frozenset[str]:
    inner = _labels(node.expr)
    if node.modifier is None:
        return frozenset()
    named = frozenset(node.modifier.labels)
    _require(named <= inner, f"{node.modifier}: {sorted(named - inner)} are no labels of what is aggregated")
    return named if node.modifier.type == promql.AggModifierType.By else inner - named


def _called(node: promql.Call) -> frozenset[str]:
    name = node.func.name
    if name in _OVER_COUNTERS | _OVER_GAUGES:
        known = _selected(node.args[0].vector_selector)
        _require((known.kind is Kind.COUNTER) == (name in _OVER_COUNTERS), f"{name}() of a {known.kind}: {node}")
        return known.labels
    if name == "histogram_quantile":
        labels = _labels(node.args[1])
        _require("le" in labels, "histogram_quantile() needs the label le")
        return labels - {"le"}
    if name == "absent":
        _labels(node.args[0])
        return frozenset()
    inner = [_labels(arg) for arg in node.args]
    return frozenset() if name == "vector" else frozenset.union(*inner)


def _combined(node: promql.BinaryExpr) -> frozenset[str]:
    left, right = _labels(node.lhs), _labels(node.rhs)
    scalars = [isinstance(side, promql.NumberLiteral) for side in (node.lhs, node.rhs)]
    if any(scalars):
        return right if scalars[0] else left
    on, many, extra = _matching(node.modifier)
    operator = str(node.op)
    if on is not None:
        _require(on <= left and on <= right, f"on {sorted(on)}: not on both sides of {operator}")
    elif not (operator == "or" and not right):
        _require(left == right, f"{operator}: {sorted(left)} never match {sorted(right)}; say which labels: on (...)")
    if operator in _SET_OPERATORS:
        return left & right if operator == "or" else left
    if many == promql.VectorMatchCardinality.OneToOne:
        return left if on is None else on
    rich, poor = (left, right) if many == promql.VectorMatchCardinality.ManyToOne else (right, left)
    _require(extra <= poor, f"{sorted(extra)} are no labels of the one side")
    return rich | extra


def _matching(
    modifier: promql.BinModifier | None,
) -> tuple[frozenset[str] | None, promql.VectorMatchCardinality, frozenset[str]]:
    if modifier is None or modifier.matching is None:
        return None, promql.VectorMatchCardinality.OneToOne, frozenset()
    _require(modifier.matching.type == promql.LabelModifierType.Include, "ignoring: name the labels that matter (on)")
    return frozenset(modifier.matching.labels), modifier.card, frozenset(modifier.group_labels or ())


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PromqlError(message)


def label_names(template: str) -> set[str]:
    """Labels that a legend (`{{role}}`) or an alert's text (`{{ $labels.role }}`) shows."""
    return set(re.findall(r"\{\{\s*(?:\$labels\.)?([a-z_]+)\s*\}\}", template))
