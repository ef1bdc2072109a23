"""The base as it is rendered here and by kustomize, and that what kustomize could do beyond it is not passed over."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from planner.manifest.files import base_objects

from .lab import K8S, Object, built, by_identity, needs_kubectl

REPOSITORY = K8S.parent


def without_hashes(objects: list[Object]) -> list[Object]:
    """kustomize's objects with the names of ConfigMaps as they are in the generators."""
    text = yaml.safe_dump_all(objects)
    for each in objects:
        name = each["metadata"]["name"]
        stem, _, suffix = name.rpartition("-")
        if each["kind"] == "ConfigMap" and len(suffix) == 10:
            text = text.replace(name, stem)
    return list(yaml.safe_load_all(text))


@pytest.mark.slow
@needs_kubectl
def test_the_base_is_what_kustomize_makes_of_it() -> None:
    ours, theirs = by_identity(base_objects()), by_identity(without_hashes(built(K8S / "base")))
    assert ours == theirs
    assert len(ours) > 10


def test_the_base_uses_only_what_is_rendered_here() -> None:
    kustomization = yaml.safe_load((K8S / "base" / "kustomization.yaml").read_text())
    assert kustomization.keys() <= {"apiVersion", "kind", "resources", "labels", "configMapGenerator"}
    assert all(entry.keys() == {"pairs"} for entry in kustomization["labels"])
    for generator in kustomization["configMapGenerator"]:
        assert generator.keys() <= {"name", "files", "literals", "options"}
        assert generator.get("options", {}).keys() <= {"disableNameSuffixHash"}


def test_callers_may_change_what_they_get() -> None:
    base_objects()[0]["metadata"]["name"] = "changed"
    assert base_objects()[0]["metadata"]["name"] != "changed"


@pytest.mark.slow
def test_an_installed_wheel_has_every_file_of_the_base_and_the_components(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for room in ("k8s", "planner"):
        shutil.copytree(REPOSITORY / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", "from setuptools import build_meta; build_meta.build_wheel('.')"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (wheel,) = source.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = set(archive.namelist())
    folders = ("base", "components", "overlays", "monitoring")
    expected = {
        str(file.relative_to(REPOSITORY))
        for folder in folders
        for file in (K8S / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert expected <= shipped, sorted(expected - shipped)
    assert "k8s/base/graph.yaml" in expected
