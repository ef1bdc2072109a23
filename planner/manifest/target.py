"""Where a manifest is written: one YAML file, or a kustomize folder with a file for each object."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from ampd.documents import write_document
from ampd.errors import UserError
from planner.manifest.base import Object
from planner.manifest.yaml_text import documents

MARK = "# Written by `ampd plan --output-manifest`, which overwrites it"
"""First line of every file of a manifest. Files that begin otherwise are never overwritten."""

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
    if foreign:
        raise UserError(
            f"--output-manifest: {path} holds {foreign[0]}, which is not part of an earlier manifest; name another "
            "folder, and add your own changes in an overlay beside it"
        )
    _check_writable(path if path.is_dir() else path.parent, path)


def write_manifest(path: Path, objects: Sequence[Object], lines: Sequence[str]) -> None:
    """Write the objects, and remove files of an earlier manifest that are no longer needed.

    `lines`: comments at the head of the file, or of the folder's kustomization.

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
