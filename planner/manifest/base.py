"""The objects of `k8s/base`, rendered without kustomize, so that a plan can be written where there is no kubectl.

Only what the base uses is known: `resources`, `labels` on the objects themselves, and `configMapGenerator`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
"""A Kubernetes object as YAML and JSON have it."""

_KNOWN = {"apiVersion", "kind", "resources", "labels", "configMapGenerator"}
_KNOWN_GENERATOR = {"name", "files", "literals", "options"}


def base_objects() -> list[Object]:
    """The base's objects, ConfigMaps first; every call returns objects of its own."""
    return rendered(Path(str(files("k8s"))) / "base")


def rendered(folder: Path) -> list[Object]:
    """What `kubectl kustomize FOLDER` prints, for a folder like the base, but for hashes in the names of ConfigMaps.

    Raises:
        ValueError: the folder's kustomization has something that is not known here.
    """
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    _refuse_unknown(kustomization, _KNOWN)
    objects = [*_config_maps(folder, kustomization)]
    for name in kustomization["resources"]:
        objects += filter(None, yaml.safe_load_all((folder / name).read_text(encoding="utf-8")))
    for entry in kustomization.get("labels", ()):
        _refuse_unknown(entry, {"pairs"})
        for one in objects:
            one["metadata"]["labels"] = {**one["metadata"].get("labels", {}), **entry["pairs"]}
    return objects


def _config_maps(folder: Path, kustomization: Mapping[str, Any]) -> Iterator[Object]:
    for generator in kustomization.get("configMapGenerator", ()):
        _refuse_unknown(generator, _KNOWN_GENERATOR)
        _refuse_unknown(generator.get("options", {}), {"disableNameSuffixHash"})
        data = {}
        for entry in generator.get("files", ()):
            key, _, path = entry.rpartition("=")
            data[key or Path(path).name] = (folder / path).read_text(encoding="utf-8")
        for entry in generator.get("literals", ()):
            key, _, value = entry.partition("=")
            data[key] = value
        yield config_map(generator["name"], data)


def config_map(name: str, data: Mapping[str, str]) -> Object:
    """A ConfigMap of text files."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": dict(data)}


def _refuse_unknown(entry: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(entry.keys() - known):
        raise ValueError(f"k8s/base/kustomization.yaml: {unknown[0]} is not known to planner.manifest.base")
