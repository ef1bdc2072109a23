"""What processes of one machine tell each other: `nvidia-smi`, files of builds and graphs."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ampd.cli.doctor import judge_gpus
from ampd.cli.serve.devices import parsed
from ampd.compiled import hash_of, notes_in, source_of
from ampd.state import embedded
from ampd.state.embedded import FOLDER_PREFIX
from benchmarks.fuzz.mutations import changed_bytes, changed_json, changed_text
from benchmarks.fuzz.target import Target

_LISTING = "0, NVIDIA H200, 143771, 12, 570.86.15\n1, NVIDIA H200, 143771, [N/A], 570.86.15\n"
_GRAPH: dict[str, Any] = {
    "namespace": "n", "state_url": "unix:///tmp/none/redis.sock", "url": "http://127.0.0.1:8000", "perf": "tiny-cpu",
    "controls": ["http://127.0.0.1:9090"],
}  # fmt: skip
_NOTES = {name: hash_of(source_of(name)) for name in ("ampd.types", "ampd.wire")}


def targets(folder: Path) -> Iterator[Target]:
    """The receivers. `folder`: for files."""
    yield Target(
        "listing of GPUs", lambda rng: changed_text(rng, changed_text(rng, _LISTING)), _list, (ValueError, csv.Error)
    )
    yield Target("file of a local graph", lambda rng: _data(rng, _GRAPH), partial(_find_graph, folder), ())
    yield Target("notes of a build", lambda rng: _data(rng, _NOTES), partial(_read_notes, folder), ())


def _data(rng: random.Random, value: Any) -> bytes:
    data = changed_json(rng, value).encode("utf-8", "surrogatepass")
    return changed_bytes(rng, data) if rng.random() < 0.2 else data


def _list(listing: str) -> None:
    gpus = parsed(listing)
    assert not gpus or judge_gpus(gpus, "12.8", len(gpus), 1).found
    assert all(gpu.index >= 0 and gpu.memory_mib >= 0 for gpu in gpus)


def _find_graph(folder: Path, data: bytes) -> None:
    """A graph is found only if its Redis answers, and none answers here."""
    place = folder / f"{FOLDER_PREFIX}x"
    place.mkdir(exist_ok=True)
    (place / "graph.json").write_bytes(data)
    with patch.object(embedded, "servers_folder", lambda: folder):
        assert embedded.local_graphs() == []


def _read_notes(folder: Path, data: bytes) -> None:
    """No build is used whose notes are not those of the present sources."""
    (folder / "hashes.json").write_bytes(data)
    notes = notes_in(folder / "hashes.json")
    if notes and all(hash_of(source_of(name)) == noted for name, noted in notes.items()):
        # A module without a source has the hash "", and nothing imports it.
        assert {name: noted for name, noted in notes.items() if noted}.items() <= _NOTES.items()
