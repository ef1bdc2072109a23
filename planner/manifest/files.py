"""The files of manifests: the objects of `k8s/base`, and where and how a manifest is written."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from ampd.documents import write_document
from ampd.errors import UserError

# -- objects as YAML that all readers understand alike: text that could be read as another type is quoted

_PLAIN = re.compile(r"(?:/|--)?[A-Za-z][A-Za-z_./:=, -]*[A-Za-z0-9_./-]*")
"""Words that no reader parses as a number, a date or a truth value; without one-letter words (`y`, `n`)."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    style = None
    if "\n" in text:
        style = "|"
    elif len(text) < 2 or not _PLAIN.fullmatch(text):
        # Readers of YAML 1.1 and 1.2 disagree about 1e3, 0o7, 12:30 and others: PyYAML would leave 1e3 plain.
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def documents(objects: Iterable[dict[str, Any]]) -> str:
    """The objects as YAML documents, with keys in the given order."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, explicit_start=True)


# -- The objects of `k8s/base`, rendered without kustomize, so that a plan can be written where there is no kubectl.
#
# Supported are only the features that the base uses: `resources`, `labels` on the objects, and `configMapGenerator`.

Object = dict[str, Any]
"""A Kubernetes object as YAML and JSON have it."""


def base_objects() -> list[Object]:
    """The objects of `k8s/base`."""
    return rendered(Path(str(files("k8s"))) / "base")


def rendered(folder: Path) -> list[Object]:
    """The output of `kubectl kustomize FOLDER` without hashes in the names of ConfigMaps, which come first."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    objects = [_generated(folder, generator) for generator in kustomization.get("configMapGenerator", ())]
    for name in kustomization["resources"]:
        objects += filter(None, yaml.safe_load_all((folder / name).read_text(encoding="utf-8")))
    for manifest in objects:
        labels = manifest["metadata"].setdefault("labels", {})
        for entry in kustomization.get("labels", ()):
            labels |= entry["pairs"]
    return objects


def _generated(folder: Path, generator: Mapping[str, Any]) -> Object:
    sources = [entry.rpartition("=") for entry in generator.get("files", ())]
    data = {key or Path(path).name: (folder / path).read_text(encoding="utf-8") for key, _, path in sources}
    return config_map(generator["name"], data | dict(entry.split("=", 1) for entry in generator.get("literals", ())))


def config_map(name: str, data: Mapping[str, str]) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": dict(data)}


# -- where a manifest is written: one YAML file, or a kustomize folder with a file for each object

MARK = "# Written by `ampd plan --output-manifest`, which overwrites it"
"""First line of every file of a manifest. Files that begin otherwise are never overwritten."""

MODEL_FILE, PLAN_FILE = "model.json", "plan.json"
"""In a folder: the performance model, for `--perf`, and the plan, for `ampd compare`. JSON has no comments, so neither
has a mark."""
REHEARSAL_FILE = "serve.toml"
"""In a folder: the settings of `ampd serve --plan`, which is a `--config` with the performance model beside it."""

_WHAT = "manifest"
_KUSTOMIZATION = "kustomization.yaml"


def is_single_file(path: Path) -> bool:
    """Whether a path names one file and not a folder."""
    return path.suffix.lower() in (".yaml", ".yml")


def check_target(path: Path) -> None:
    """Refuse a path that cannot be written, or that holds anything but an earlier manifest.

    Raises:
        UserError: as one line.
    """
    if is_single_file(path):
        if path.is_dir():
            raise UserError(f"--output-manifest: {path} is a folder; name a file in it, or a folder without .yaml")
        if path.exists() and not _is_ours(path):
            raise UserError(f"--output-manifest: {path} exists and is no earlier manifest; remove it or name another")
        _check_writable(path.parent, path)
        return
    if path.exists() and not path.is_dir():
        raise UserError(f"--output-manifest: {path} is a file; end its name in .yaml, or name a folder")
    foreign = sorted(item.name for item in path.iterdir() if not _is_ours(item)) if path.is_dir() else []
    if _is_ours(path / _KUSTOMIZATION):
        foreign = [name for name in foreign if name not in (MODEL_FILE, PLAN_FILE)]
    if foreign:
        raise UserError(
            f"--output-manifest: {path} holds {foreign[0]}, which is not part of an earlier manifest; name another "
            "folder, and add your own changes in an overlay beside it"
        )
    _check_writable(path if path.is_dir() else path.parent, path)


def write_manifest(
    path: Path, objects: Sequence[Object], lines: Sequence[str], beside: Mapping[str, str] | None = None
) -> None:
    """Write the objects, and remove files of an earlier manifest that are no longer needed.

    Args:
        lines: comments at the head of the file, or of the folder's kustomization.
        beside: name -> text of further files, which only a folder has.

    Raises:
        UserError: the path cannot be written.
    """
    check_target(path)
    # A line break in a name from outside would end the comment.
    head = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    if is_single_file(path):
        write_document(f"{MARK}.\n{head}{documents(objects)}", path, _WHAT)
        return
    files = {_file_name(entry): f"{MARK}.\n{documents([entry])}" for entry in objects}
    kustomization = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": list(files)}
    files[_KUSTOMIZATION] = f"{MARK}.\n{head}{documents([kustomization])}"
    files |= {name: f"{MARK}.\n{text}" if name == REHEARSAL_FILE else text for name, text in (beside or {}).items()}
    try:
        path.mkdir(exist_ok=True)
        for name, text in files.items():
            write_document(text, path / name, _WHAT)
        for item in path.iterdir():
            if item.name not in files:
                item.unlink()
    except OSError as error:
        raise UserError(f"{path}: cannot write the {_WHAT} ({error.strerror})") from None


def _file_name(entry: Object) -> str:
    return f"{entry['kind']}-{entry['metadata']['name']}.yaml".lower()


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MARK.encode())) == MARK.encode()
    except OSError:
        return False


def _check_writable(folder: Path, path: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"--output-manifest: {path} cannot be written: {folder}: {error.strerror}; "
            "name a folder that you may write to"
        ) from None
