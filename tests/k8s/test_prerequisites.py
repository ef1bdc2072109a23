"""Whoever follows the guide, or k8s/README.md, has made all that pods mount before the graph is applied."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.manifest import planned
from planner.manifest.files import base_objects, rendered
from tests.k8s.pods import pods
from tests.planner.manifest.lab import objects_of

ROOT = Path(__file__).parents[2]
GUIDE, README = "docs/guide.md", "k8s/README.md"
APPLY = {GUIDE: "kubectl apply -k mine", README: "kubectl apply -k k8s/overlays/single-node"}
"""The command of a page that starts the graph."""

Thing = tuple[str, str, str]
"""Kind, name, and key in it; an empty key: the whole object."""


def mounted(documents: Any) -> set[Thing]:
    """What pods cannot start without."""
    found: set[Thing] = set()
    for pod in pods(documents):
        for volume in pod.spec.get("volumes", []):
            if secret := volume.get("secret"):
                names = [("Secret", secret["secretName"], item["key"]) for item in secret.get("items", [])]
                found |= set() if secret.get("optional") else {*names, ("Secret", secret["secretName"], "")}
            if (config := volume.get("configMap")) and not config.get("optional"):
                found.add(("ConfigMap", config["name"], ""))
            if claim := volume.get("persistentVolumeClaim"):
                found.add(("PersistentVolumeClaim", claim["claimName"], ""))
        for container in pod.containers():
            for source in container.get("envFrom", []):
                found |= {(kind, name, "") for kind, name in _referred(source)}
            for entry in [*pod.shared_env, *container.get("env", [])]:
                found |= {(kind, name, entry["valueFrom"][ref]["key"]) for ref, kind, name in _keys(entry)}
    return found


def _referred(source: Any) -> Iterator[tuple[str, str]]:
    for ref, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
        if (named := source.get(ref)) and not named.get("optional"):
            yield kind, named["name"]


def _keys(entry: Any) -> Iterator[tuple[str, str, str]]:
    for ref, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
        if (named := entry.get("valueFrom", {}).get(ref)) and not named.get("optional"):
            yield ref, kind, named["name"]


def held(documents: Any) -> set[Thing]:
    """What the documents make."""
    things: set[Thing] = set()
    for each in documents:
        kind, name = each["kind"], each["metadata"]["name"]
        things |= {(kind, name, ""), *((kind, name, key) for key in each.get("data", {}))}
    return things


def made_by(commands: list[str], page: str = "") -> set[Thing]:
    """What commands of `kubectl` make, before the graph is applied."""
    things: set[Thing] = set()
    for command in commands:
        if secret := re.match(r"kubectl create secret generic (\S+)", command):
            keys = re.findall(r"--from-literal=(\w+)=", command)
            things |= {("Secret", secret[1], key) for key in ["", *keys]}
        if folder := re.match(r"kubectl apply -k (\S+)", command):
            things |= held(rendered(ROOT / _of_k8s(folder[1], page)))
    return things


def _of_k8s(folder: str, page: str) -> str:
    """The folder of k8s/ that a folder is an overlay over, as the page shows it."""
    overlay = re.search(rf"^# {re.escape(folder)}/kustomization.yaml\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    return str(yaml.safe_load(overlay[1])["resources"][0]).removeprefix("../") if overlay else folder


@cache
def page_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def commands_of(path: str) -> list[str]:
    """The commands of a page."""
    found = re.findall(r"^(?:\$ |    )((?:docker|kubectl) .*)$", page_of(path), re.MULTILINE)
    return [command.partition("  #")[0].strip() for command in found]


def before_the_graph(path: str) -> list[str]:
    commands = commands_of(path)
    return [
        each for each in commands[: commands.index(APPLY[path])] if not each.startswith("kubectl apply -k k8s/doctor")
    ]


def missing(documents: Any, made: set[Thing]) -> set[Thing]:
    return mounted(documents) - held(documents) - made


GRAPHS = {"base": base_objects, "planned": objects_of}


@pytest.mark.parametrize("path", [GUIDE, README])
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_commands_of_a_page_make_what_the_graph_mounts(graph: str, path: str) -> None:
    assert missing(GRAPHS[graph](), made_by(before_the_graph(path), page_of(path))) == set()


@pytest.mark.parametrize("graph", GRAPHS)
def test_what_a_plan_prints_makes_the_secrets(graph: str) -> None:
    claim = ("PersistentVolumeClaim", "ampd-models", "")
    assert missing(GRAPHS[graph](), made_by(list(planned.SECRETS))) == {claim}


def test_the_job_that_downloads_a_model_has_the_image_of_the_guide() -> None:
    """It would wait two hours for an image that no registry has."""
    overlays = re.findall(r"^# (\w+)/kustomization.yaml\n(.*?)```", page_of(GUIDE), re.DOTALL | re.MULTILINE)
    images = {name: yaml.safe_load(text)["images"] for name, text in overlays}
    assert images["weights"] == images["mine"]
    (build,) = (each for each in before_the_graph(GUIDE) if each.startswith("docker build"))
    (image,) = images["mine"]
    assert f"docker push {image['newName']}:{image['newTag']}" in build
    assert page_of(GUIDE).index("# weights/") < page_of(GUIDE).index("kubectl apply -k weights")


def test_what_the_guide_makes_it_also_removes() -> None:
    commands = commands_of(GUIDE)
    made = {match[1] for each in commands if (match := re.match(r"kubectl create secret generic (\S+)", each))}
    removed = {name for each in commands if each.startswith("kubectl delete secret") for name in each.split()[3:]}
    assert removed == made
    applied = {each.split()[3] for each in commands if each.startswith("kubectl apply -k")}
    assert {each.split()[3] for each in commands if each.startswith("kubectl delete -k")} == applied
