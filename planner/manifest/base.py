"""The objects of `k8s/base`, rendered without kustomize, so that a plan can be written where there is no kubectl.

Supported are only the features that the base uses: `resources`, `labels` on the objects, and `configMapGenerator`.
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
    """The base's objects, ConfigMaps first. Each call returns new objects."""
    return rendered(Path(str(files("k8s"))) / "base")


def rendered(folder: Path) -> list[Object]:
    """The output of `kubectl kustomize FOLDER` for a folder like the base, without hashes in the names of ConfigMaps.

    Raises:
        ValueError: the folder's kustomization uses an unsupported feature.
    """
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    _refuse_unknown(kustomization, _KNOWN)
    objects = [*_config_maps(folder, kustomization)]
    for name in kustomization["resources"]:
        objects += filter(None, yaml.safe_load_all((folder / name).read_text(encoding="utf-8")))
    for entry in kustomization.get("labels", ()):
        _refuse_unknown(entry, {"pairs"})
        for manifest in objects:
            manifest["metadata"]["labels"] = {**manifest["metadata"].get("labels", {}), **entry["pairs"]}
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
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": dict(data)}


def _refuse_unknown(entry: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(entry.keys() - known):
        raise ValueError(f"k8s/base/kustomization.yaml: planner.manifest.base does not support {unknown[0]}")
