"""The Prometheus operator's kinds (monitoring.coreos.com/v1), as far as we use them.

Narrower than the operator's own definitions, which are very large: only the fields that our objects have, each with the
shape that the operator documents. A misspelt field is an error here; in a cluster it would be dropped without a word.
"""

from typing import Any

from jsonschema import Draft202012Validator

_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_DURATION = {"type": "string", "pattern": r"^[1-9][0-9]*(ms|s|m|h)$"}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def _list(of: Any) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": of}


_RELABELING = _object(
    {"sourceLabels": _list(_TEXT), "targetLabel": _TEXT},
    action={"enum": ["replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep"]},
    regex=_TEXT,
    replacement=_TEXT,
)
_ENDPOINT = _object(
    {"port": _TEXT},
    path={"type": "string", "pattern": "^/"},
    interval=_DURATION,
    honorLabels={"type": "boolean"},
    relabelings=_list(_RELABELING),
)
_RULE = _object(
    {"alert": {"type": "string", "pattern": "^[A-Za-z]\\w*$"}, "expr": _TEXT},
    **{"for": _DURATION, "labels": _TEXTS, "annotations": _TEXTS},
)
_SPECS = {
    "PodMonitor": _object(
        {"selector": _object({"matchLabels": _TEXTS}), "podMetricsEndpoints": _list(_ENDPOINT)}, jobLabel=_TEXT
    ),
    "PrometheusRule": _object({"groups": _list(_object({"name": _TEXT, "rules": _list(_RULE)}))}),
}


def monitoring_problems(document: dict[str, Any]) -> list[str]:
    """What is wrong with a PodMonitor or PrometheusRule, as lines."""
    schema = _object(
        {
            "apiVersion": {"const": "monitoring.coreos.com/v1"},
            "kind": {"enum": list(_SPECS)},
            "metadata": _object({"name": _TEXT}, namespace=_TEXT, labels=_TEXTS, annotations=_TEXTS),
            "spec": _SPECS.get(document["kind"], False),
        }
    )
    errors = Draft202012Validator(schema).iter_errors(document)
    return ["/".join(map(str, error.absolute_path)) + f": {error.message}" for error in errors]
