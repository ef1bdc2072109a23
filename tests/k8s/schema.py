"""Validation as strict as a reviewer: fields that the API server would drop without a word are errors here."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

from tests.k8s.monitoring_schema import monitoring_problems

_CRD = Path(__file__).parent / "schemas" / "nvidia.com_dynamographdeployments.yaml.gz"
_OBJECT_META = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
KUBERNETES_VERSION = "1.32.0"
"""Oldest version whose schemas the manifests are held against."""


def problems(document: dict[str, Any]) -> list[str]:
    """What is wrong with one document, as lines; validated by its kind."""
    return list(_problems(json.dumps(document)))


@cache
def _problems(text: str) -> list[str]:
    """Most documents come in many kustomizations, so each is validated once."""
    document = json.loads(text)
    if document["apiVersion"].startswith("nvidia.com/"):
        return graph_problems(document)
    if document["apiVersion"].startswith("monitoring.coreos.com/"):
        return monitoring_problems(document)
    try:
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'/'.join(map(str, error.path))}: {error.message}"]
    return []


def graph_problems(document: dict[str, Any]) -> list[str]:
    """What is wrong with a DynamoGraphDeployment."""
    version = str(document["apiVersion"]).removeprefix("nvidia.com/")
    errors = Draft202012Validator(_schema(version)).iter_errors(document)
    lines = ["/".join(map(str, error.absolute_path)) + f": {error.message}" for error in errors]
    return lines + _duplicates(_schema(version), document, "") + _rules(document)


@cache
def _schema(version: str) -> dict[str, Any]:
    with gzip.open(_CRD) as file:
        definition = yaml.load(file, yaml.CSafeLoader)
    (schema,) = (
        each["schema"]["openAPIV3Schema"] for each in definition["spec"]["versions"] if each["name"] == version
    )
    names = definition["spec"]["names"]
    properties = {
        **schema["properties"],
        "metadata": _OBJECT_META,
        "kind": {"const": names["kind"]},
        "status": False,
    }
    return strict({**schema, "properties": properties, "required": ["apiVersion", "kind", "metadata", "spec"]})


def strict(schema: Any) -> Any:
    """A structural schema that refuses what it does not know, except where it says that anything may be kept."""
    if not isinstance(schema, dict):
        return schema
    result = {**schema}
    if "properties" in schema:
        result["properties"] = {name: strict(each) for name, each in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = strict(schema.get("additionalProperties", False))
    elif "additionalProperties" in schema:
        result["additionalProperties"] = strict(schema["additionalProperties"])
    if "items" in schema:
        result["items"] = strict(schema["items"])
    return result


def _duplicates(schema: Any, value: Any, path: str) -> list[str]:
    """Lists that are maps may not name a key twice: the API server refuses it."""
    if not isinstance(schema, dict):
        return []
    found: list[str] = []
    if isinstance(value, dict):
        for name, each in value.items():
            child = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            found += _duplicates(child, each, f"{path}/{name}")
    elif isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys", [])
        named = [tuple(each.get(key) for key in keys) for each in value] if keys else []
        found += [f"{path}: {key} twice" for key in sorted(set(named), key=str) if named.count(key) > 1]
        for index, each in enumerate(value):
            found += _duplicates(schema.get("items"), each, f"{path}/{index}")
    return found


def _rules(document: dict[str, Any]) -> list[str]:
    """The resource's rules that are written in CEL or said in words only."""
    components = document["spec"].get("components", [])
    lines = []
    names = [each.get("name", "").lower() for each in components]
    lines += [f"component name {name!r} twice" for name in sorted(set(names)) if names.count(name) > 1]
    for each in components:
        containers = each.get("podTemplate", {}).get("spec", {}).get("containers", [])
        mains = [container for container in containers if container.get("name") == "main" and container.get("image")]
        if len(mains) != 1:
            lines.append(f"{each.get('name')}: needs one container `main` with an image")
        if each.get("minAvailable", 0) > each.get("replicas", 1):
            lines.append(f"{each.get('name')}: minAvailable above replicas")
    if "restart" in document["spec"]:
        lines.append("spec.restart must not be set on creation")
    return lines
