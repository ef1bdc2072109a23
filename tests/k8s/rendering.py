"""Rendering kustomizations as a user does, and the combinations that are checked."""

import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

K8S = Path(__file__).parents[2] / "k8s"
Document = dict[str, Any]

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")

OVERLAYS = ("overlays/single-node", "overlays/multi-node", "overlays/no-gpu")
KUSTOMIZATIONS = ("base", *OVERLAYS, "doctor", "models")
"""What can be rendered by itself; components are rendered within the combinations."""

COMBINATIONS: dict[str, tuple[str, ...]] = {
    "base+redis-tls": ("base", "components/redis-tls"),
    "base+external-redis": ("base", "components/external-redis"),
    "base+monitoring": ("base", "monitoring"),
    "base+public-route": ("base", "components/public-route"),
    "base+no-status-relay": ("base", "components/no-status-relay"),
    "single-node+rdma": ("overlays/single-node", "components/rdma"),
    "single-node+rdma+redis-tls": ("overlays/single-node", "components/rdma", "components/redis-tls"),
    "multi-node+external-redis": ("overlays/multi-node", "components/external-redis"),
    "multi-node+redis-tls": ("overlays/multi-node", "components/redis-tls"),
    "no-gpu+redis-tls": ("overlays/no-gpu", "components/redis-tls"),
}

GRAPHS = ("base", *OVERLAYS, *COMBINATIONS)
"""Everything that renders to a whole graph."""

ALL = (*KUSTOMIZATIONS, *COMBINATIONS)

RARE = {"base+external-redis", "base+public-route", "single-node+rdma", "multi-node+redis-tls", "no-gpu+redis-tls"}
"""Their parts are in other combinations too, so the fast tests leave them out."""


def for_each(names: Iterable[str]) -> pytest.MarkDecorator:
    """Run a test with the `name` of each of these kustomizations."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.slow) if name in RARE else name for name in names]
    )


def kustomize(folder: Path) -> list[Document]:
    """The documents of a kustomization. Raises `CalledProcessError` with kustomize's words in `stderr`."""
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True, timeout=60)
    return [document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document]


def kustomize_together(folder: Path, resources: list[str], **fields: Any) -> list[Document]:
    """A kustomization of one's own beside a copy of k8s/, as a user writes it; `fields` are further fields of it.

    Args:
        folder: a temporary one.
        resources: folders of k8s/.
    """
    shutil.copytree(K8S, folder / "k8s", dirs_exist_ok=True)
    mine = folder / "k8s" / "overlays" / "mine"
    mine.mkdir(exist_ok=True)
    above = {name: [f"../../{part}" for part in parts] for name, parts in {"resources": resources}.items()}
    if components := fields.pop("components", []):
        above["components"] = [f"../../{part}" for part in components]
    (mine / "kustomization.yaml").write_text(yaml.safe_dump({**above, **fields}))
    return kustomize(mine)


@cache
def rendered(name: str) -> tuple[Document, ...]:
    """The documents of a kustomization or combination; not to be changed."""
    if name in KUSTOMIZATIONS:
        return tuple(kustomize(K8S / name))
    import tempfile

    resource, *components = COMBINATIONS[name]
    with tempfile.TemporaryDirectory() as folder:
        return tuple(kustomize_together(Path(folder), [resource], components=components))


def named(documents: Any, kind: str, name: str) -> Document:
    """The one document of that kind and name."""
    (found,) = (each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return dict(found)


def graph_of(documents: Any) -> Document:
    """The DynamoGraphDeployment."""
    (found,) = (each for each in documents if each["kind"] == "DynamoGraphDeployment")
    return dict(found)
