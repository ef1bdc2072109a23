"""What processes of one machine tell each other: measuring processes, files of builds and graphs."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ampd.cli.doctor.gpus import GpusReading, judge_gpus, of_torch, parsed
from ampd.cli.doctor.transport import measured
from ampd.cli.serve import local_graphs
from ampd.compiled import hash_of, notes_in, source_of
from ampd.state.embedded import FOLDER_PREFIX
from benchmarks.fuzz.mutations import changed_bytes, changed_json, changed_text
from benchmarks.fuzz.target import Target

_LISTING = "0, NVIDIA H200, 143771, 12, 570.86.15, 16, 16, 0\n1, NVIDIA H200, 143771, 0, 570.86.15, 8, [N/A], [N/A]\n"
_TORCH = {"cuda": "12.8", "names": ["NVIDIA H200", "NVIDIA H200"]}
_RATE = {"gb_per_s": 9.5, "copy_gb_per_s": 11.0, "block_s": 0.0002, "is_right": True}
_UCX_LOG = (
    "[1] parser.c:1 UCX INFO | ucp_context_0 intra-node cfg#1 | remote memory read by ucp_get* into host |\n"
    "[1] proto.c:1 UCX INFO | 0..2276 | software emulation | posix/memory |\n"
    "[1] proto.c:1 UCX INFO | 2277..inf | zero-copy | cma/memory |\n"
)
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
    yield Target("answer of PyTorch", lambda rng: changed_json(rng, _TORCH), _judge_torch, ())
    yield Target("measured transport", _rates, _judge_rates, ())
    yield Target("file of a local graph", lambda rng: _data(rng, _GRAPH), partial(_find_graph, folder), ())
    yield Target("notes of a build", lambda rng: _data(rng, _NOTES), partial(_read_notes, folder), ())


def _data(rng: random.Random, value: Any) -> bytes:
    data = changed_json(rng, value).encode("utf-8", "surrogatepass")
    return changed_bytes(rng, data) if rng.random() < 0.2 else data


def _list(listing: str) -> None:
    gpus = parsed(listing)
    findings = judge_gpus(GpusReading(gpus), 1)
    assert all(finding.found for finding in findings)
    assert all(gpu.index >= 0 and gpu.memory_mib >= 0 for gpu in gpus)


def _judge_torch(answer: str) -> None:
    reading = of_torch(parsed(_LISTING), answer)
    assert reading.problem or isinstance(reading.torch_names, tuple)
    assert judge_gpus(reading, 1)


def _rates(rng: random.Random) -> tuple[str, str]:
    printed = "NIXL INFO\n" + (changed_json(rng, _RATE) if rng.random() < 0.7 else json.dumps(_RATE))
    return changed_text(rng, printed) if rng.random() < 0.2 else printed, changed_text(rng, _UCX_LOG)


def _judge_rates(given: tuple[str, str]) -> None:
    reading = measured(*given)
    assert reading.problem or 0 < reading.gb_per_s < float("inf")
    assert all(isinstance(name, str) for name in reading.transports)


def _find_graph(folder: Path, data: bytes) -> None:
    """A graph is found only if its Redis answers, and none answers here."""
    place = folder / f"{FOLDER_PREFIX}x"
    place.mkdir(exist_ok=True)
    (place / "graph.json").write_bytes(data)
    with patch.object(local_graphs, "servers_folder", lambda: folder):
        assert local_graphs.local_graphs() == []


def _read_notes(folder: Path, data: bytes) -> None:
    """No build is used whose notes are not those of the present sources."""
    (folder / "hashes.json").write_bytes(data)
    notes = notes_in(folder / "hashes.json")
    if notes and all(hash_of(source_of(name)) == noted for name, noted in notes.items()):
        assert notes.items() <= _NOTES.items()
