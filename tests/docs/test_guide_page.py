"""docs/guide.md says what the settings say, shows what its commands print, and creates what its manifests mount."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.reference import guide
from planner.manifest.files import base_objects
from router.settings import CoordinatorSettings

ROOT = Path(__file__).parents[2]
PAGE = guide.PAGE.read_text(encoding="utf-8")


def test_rounds_in_progress_have_the_documented_time_after_ctrl_c() -> None:
    documented = re.search(r"rounds in progress have finished, for which they have (\d+) s", " ".join(PAGE.split()))
    assert documented
    assert float(documented[1]) == CoordinatorSettings.model_fields["drain_s"].default


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_outputs_are_those_of_the_commands() -> None:
    """If not: python -m docs.reference.guide"""
    assert guide.made(PAGE) == PAGE


def test_the_outputs_are_found() -> None:
    blocks = [found[2] for found in guide._BLOCK.finditer(PAGE)]
    shown = [command for block in blocks for command, output in guide.commands(block) if output]
    assert sum(bool(guide._MADE.match(command)) for command in shown) == 5


def _mounted(value: Any, kind: str) -> Iterator[dict[str, Any]]:
    """All objects below a key, such as `secretKeyRef`, wherever they are."""
    if isinstance(value, dict):
        if kind in value:
            yield value[kind]
        for each in value.values():
            yield from _mounted(each, kind)
    elif isinstance(value, list):
        for each in value:
            yield from _mounted(each, kind)


def test_the_commands_create_every_secret_that_the_manifests_mount() -> None:
    objects = base_objects()
    volumes = {each["secretName"] for each in _mounted(objects, "secret") if not each.get("optional")}
    keys = {(each["name"], each["key"]) for each in _mounted(objects, "secretKeyRef") if not each.get("optional")}
    created = re.findall(r"^\$ kubectl create secret generic (\S+) --from-literal=(\w+)=", PAGE, re.MULTILINE)
    assert volumes | {name for name, _ in keys} == {name for name, _ in created} == {"ampd-redis", "ampd-graph"}
    assert keys <= set(created)
    deleted = re.search(r"^\$ kubectl delete secret (.*)$", PAGE, re.MULTILINE)
    assert deleted
    assert set(deleted[1].split()) == {name for name, _ in created}


def test_the_commands_create_the_volume_and_name_the_image() -> None:
    claims = {each["claimName"] for each in _mounted(base_objects(), "persistentVolumeClaim")}
    made = {yaml.safe_load((ROOT / "k8s" / "models" / "volume.yaml").read_text())["metadata"]["name"]}
    assert claims == made == {"ampd-models"}
    overlays = re.findall(r"```yaml\n# (\w+)/kustomization.yaml\n(.*?)```", PAGE, re.DOTALL)
    parsed = {name: yaml.safe_load(text) for name, text in overlays}
    assert parsed["weights"]["resources"] == ["../k8s/models"]
    images = {each["image"].partition(":")[0] for each in _mounted_images(base_objects())}
    for name, overlay in parsed.items():
        assert f"$ kubectl apply -k {name}" in PAGE
        assert {each["name"] for each in overlay["images"]} <= images
        assert overlay["images"][0]["newName"] == "REGISTRY/ampd"
    assert "$ docker build -t REGISTRY/ampd:0.1.0 " in PAGE


def _mounted_images(objects: Any) -> Iterator[dict[str, Any]]:
    if isinstance(objects, dict):
        if isinstance(objects.get("image"), str):
            yield objects
        for each in objects.values():
            yield from _mounted_images(each)
    elif isinstance(objects, list):
        for each in objects:
            yield from _mounted_images(each)
