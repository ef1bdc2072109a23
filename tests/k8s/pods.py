"""The pods that rendered manifests describe, whatever kind of object makes them."""

import base64
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.k8s.rendering import Document

_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)|\$\$")
COMPONENT = "app.kubernetes.io/component"
INSTANCE = "app.kubernetes.io/instance"
UNKNOWN_SECRET = "5ec2e7"
"""Stands for the value of a Secret that the user makes."""


@dataclass(frozen=True)
class Pod:
    """One kind of pod.

    Attributes:
        name: of the component or object.
        shared_env: what the graph gives to all of its components, before the container's own.
        source: the component or object.
    """

    name: str
    kind: str
    replicas: int
    labels: Mapping[str, str]
    spec: Document
    shared_env: tuple[Document, ...]
    source: Document

    @property
    def main(self) -> Document:
        """The first container; components have just one."""
        return dict(self.spec["containers"][0])

    def containers(self) -> Iterator[Document]:
        """All containers, those that run first included."""
        yield from self.spec.get("initContainers", [])
        yield from self.spec["containers"]

    def is_graph(self) -> bool:
        return self.kind == "DynamoGraphDeployment"


def pods(documents: Any) -> list[Pod]:
    """Every kind of pod in the documents."""
    found = []
    for document in documents:
        spec, kind = document.get("spec", {}), document["kind"]
        if kind == "DynamoGraphDeployment":
            for each in spec["components"]:
                template = each["podTemplate"]
                labels = {**spec.get("labels", {}), **template["metadata"]["labels"]}
                env = tuple(spec.get("env", []))
                found.append(Pod(each["name"], kind, each.get("replicas", 1), labels, template["spec"], env, each))
        elif kind in ("StatefulSet", "Deployment", "Job"):
            template = spec["template"]
            labels, replicas = template["metadata"]["labels"], spec.get("replicas", 1)
            found.append(Pod(document["metadata"]["name"], kind, replicas, labels, template["spec"], (), document))
    return found


def environment(pod: Pod, container: Document, documents: Any) -> dict[str, str]:
    """A container's environment as Kubernetes makes it: references see what was defined before them.

    Raises:
        AssertionError: a reference that Kubernetes would leave as it is, which is a name that is not defined (yet).
    """
    variables: dict[str, str] = {}
    for source in container.get("envFrom", []):
        variables |= _data(documents, "ConfigMap", source["configMapRef"]["name"])
    own = {entry["name"] for entry in container.get("env", [])}
    shared = [] if container in pod.spec.get("initContainers", []) else pod.shared_env
    for entry in [*(each for each in shared if each["name"] not in own), *container.get("env", [])]:
        if "value" in entry:
            variables[entry["name"]] = expanded(str(entry["value"]), variables)
        else:
            reference = entry["valueFrom"]["secretKeyRef"]
            data = _data(documents, "Secret", reference["name"])
            variables[entry["name"]] = data.get(reference["key"], UNKNOWN_SECRET)
    return variables


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` replaced, `$$` as `$`."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        assert match[1] in variables, f"{text!r} refers to {match[1]}, which is not defined before it"
        return variables[match[1]]

    return _REFERENCE.sub(value, text)


def command_line(pod: Pod, container: Document, documents: Any) -> list[str]:
    """What the container runs."""
    variables = environment(pod, container, documents)
    return [expanded(word, variables) for word in [*container["command"], *container.get("args", [])]]


def secret_value(documents: Any, volume: Document, key: str) -> str:
    """A value of the Secret that a volume holds."""
    return _data(documents, "Secret", volume["secretName"]).get(key, UNKNOWN_SECRET * 4)


def _data(documents: Any, kind: str, name: str) -> dict[str, str]:
    for document in documents:
        if (document["kind"], document["metadata"]["name"]) == (kind, name):
            data = dict(document.get("data", {}))
            if kind == "Secret":
                return {key: base64.b64decode(value).decode() for key, value in data.items()}
            return data
    return {}


def selects(selector: Document, labels: Any) -> bool:
    """Kubernetes' label selector."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for term in selector.get("matchExpressions", []):
        assert term["operator"] == "In"
        if labels.get(term["key"]) not in term["values"]:
            return False
    return True
