"""What a worker and the ranks of its engine share: the form of records, the memory of the store, and their messages."""

from __future__ import annotations

import errno
import logging
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass
from fcntl import F_ADD_SEALS, F_SEAL_SHRINK, fcntl
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.msgpack import Decoder, Encoder

from ampd.keys import KEY_BYTES
from ampd.types import GIB, Factors

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Share:
    """The heads of a section that one rank holds.

    Attributes:
        first: the first of them, counted over the whole model.
        count: how many follow each other from there.
        writes: whether this rank writes them; the other ranks that hold the same head only load it.
    """

    first: int
    count: int
    writes: bool


def head_share(heads: int, tp: int, rank: int) -> Share:
    """The heads that `rank` of `tp` ranks holds.

    With fewer heads than ranks, groups of neighbouring ranks hold the same head, as in SGLang
    (`rank // (tp // heads)`). The first rank of a group writes it.

    Raises:
        ValueError: neither of the two numbers divides the other, or there is no such rank.
    """
    if heads < 1 or not 0 <= rank < tp:
        raise ValueError(f"no share of {heads} heads for rank {rank} of {tp}")
    if heads % tp == 0:
        count = heads // tp
        return Share(rank * count, count, True)
    if tp % heads:
        raise ValueError(f"{heads} heads cannot be divided over {tp} ranks")
    group = tp // heads
    return Share(rank // group, 1, rank % group == 0)


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a record in which every head has the same size: [head of the model][layer][bytes].

    Attributes:
        heads: of the whole model.
        layers: of the pool, not of the model.
        head_bytes: of one head in one layer.
    """

    name: str
    heads: Positive
    layers: Positive
    head_bytes: Positive

    @property
    def block_bytes(self) -> int:
        """Bytes of one head over all layers; they are contiguous."""
        return self.layers * self.head_bytes

    @property
    def bytes(self) -> int:
        return self.heads * self.block_bytes


class PoolGeometry(Struct, frozen=True, forbid_unknown_fields=True):
    """The records of one pool.

    Attributes:
        name: as SGLang names the pool: `kv`, `swa` or `mamba`.
        sections: the parts of a record, in order.
        window_pages: 0 if a prefix can be restored only with the record of each of its pages; otherwise, how many
            pages before the end of the prefix need a record.
    """

    name: str
    sections: tuple[Section, ...]
    window_pages: NotNegative = 0

    @property
    def record_bytes(self) -> int:
        return sum(section.bytes for section in self.sections)

    def starts(self) -> dict[str, int]:
        """The byte of a record at which each section starts."""
        starts, at = {}, 0
        for section in self.sections:
            starts[section.name] = at
            at += section.bytes
        return starts


class KvGeometry(Struct, frozen=True, forbid_unknown_fields=True):
    """The records of a worker. Workers exchange KV if this is equal, whatever their TP.

    Attributes:
        fingerprint: of the weights and of the settings that the KV depends on.
        page_size: tokens per page.
    """

    fingerprint: str
    page_size: Positive
    pools: tuple[PoolGeometry, ...]

    @property
    def page_bytes(self) -> int:
        """By how much a long context grows per page: windows and states stay as large as they are."""
        return sum(pool.record_bytes for pool in self.pools if not pool.window_pages)

    @property
    def longest_window_pages(self) -> int:
        """Of all pools of which a prefix needs only the last pages."""
        return max(pool.window_pages for pool in self.pools)

    def pool(self, name: str) -> PoolGeometry:
        """The pool of that name. Raises `KeyError` if there is none."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)


def mismatch(ours: KvGeometry, theirs: KvGeometry) -> str | None:
    """Why two workers cannot exchange KV, in one line; None if they can."""
    if ours.page_size != theirs.page_size:
        return f"page size differs: {ours.page_size} tokens here, {theirs.page_size} there"
    for here, there in zip_longest(ours.pools, theirs.pools):
        if here != there:
            return f"KV pools differ: {here} here, {there} there"
    if ours.fingerprint != theirs.fingerprint:
        return f"weights or settings differ: fingerprint {ours.fingerprint[:16]} here, {theirs.fingerprint[:16]} there"
    return None


PageWindow = tuple[int, Callable[[int], bool]]
"""Of a pool: the pages before the end of a prefix whose records it needs (0: every page), and whether it has one."""


def restorable_lengths(pages: int, attention_windows: Sequence[PageWindow]) -> Iterator[int]:
    """All lengths in pages, up to `pages`, at which every pool has its window; the longest first."""
    length = pages
    there_from = [length] * len(attention_windows)
    while length:
        holes = (_hole(window, there_from, number, length) for number, window in enumerate(attention_windows))
        hole = max(holes, default=-1)
        if hole < 0:
            yield length
        # The hole also lies in the windows of all the lengths between.
        length = hole if hole >= 0 else length - 1
        there_from = [min(start, length) for start in there_from]


def window_start(window_pages: int, length: int) -> int:
    """The first page of the window of a prefix of `length` pages."""
    return max(0, length - (window_pages or length))


def _hole(window: PageWindow, there_from: list[int], number: int, length: int) -> int:
    """The last page without a record in the window of a prefix of `length` pages; -1: the window is complete.

    `there_from`: from this page to `length`, all records are known to be there. It is brought up to date.
    """
    window_pages, has = window
    start = window_start(window_pages, length)
    while there_from[number] > start:
        if not has(there_from[number] - 1):
            return there_from[number] - 1
        there_from[number] -= 1
    return -1


TRIED_PAGE_TOKENS = (16, 32, 64)
"""Page sizes, and below degrees and types of KV, with which real engines have run the KV store.

Others need `--allow-untested`.
"""

TRIED_DEGREES: Mapping[str, tuple[int, ...]] = {
    "MHATokenToKVPool": (1, 2, 4, 8),
    "MLATokenToKVPool": (1, 2, 4),
    "SWAKVPool": (1, 2, 4),
    "HybridLinearKVPool": (1, 2, 4),
}
"""By SGLang's class of the KV pool. `docs/models.md` lists the models and the pairs of degrees."""

_FLOATS = ("torch.float32", "torch.bfloat16")
TRIED_TYPES: Mapping[str, tuple[str, ...]] = {
    "MHATokenToKVPool": (*_FLOATS, "torch.float16", "torch.float8_e4m3fn"),
    "MLATokenToKVPool": (*_FLOATS, "torch.float8_e4m3fn"),
    "SWAKVPool": (*_FLOATS, "torch.float8_e4m3fn"),
    "HybridLinearKVPool": _FLOATS,
}
"""The KV of a pool, also by its class."""

TRIED_STATE_TYPES: tuple[tuple[str, ...], tuple[str, ...]] = (("torch.float32",), _FLOATS)
"""Of the temporal part of a state, and of its convolution."""


# -- The memory of a KV store: one segment of host memory that the worker and every rank of its engine map

log = logging.getLogger(__name__)

MINIMUM_BYTES = 256 << 20
"""The default size is never below this."""
_ROOT = Path("/")
_NAME = "ampd-kv-store"

NEIGHBOUR_BYTES = 1 << 48
"""The offsets of a process reach over the stores that it maps: those of its own store are below this number, and those
of neighbour number n begin at n times this number."""

Place = tuple[int, int, int, int]
"""Of a store, for neighbours: process id, file descriptor, the number of the file, and its size in bytes."""


def this_host() -> str:
    """A name for the processes that can map each other's stores: of one boot of a machine, one user, one container."""
    boot = (_ROOT / "proc/sys/kernel/random/boot_id").read_text()
    namespace = (_ROOT / "proc/self/ns/pid").stat().st_ino
    return sha256(f"{boot} {namespace} {os.getuid()}".encode()).hexdigest()[:16]


class StoreMemory:
    """Anonymous shared memory. It disappears when the last process that maps it has ended, however they end.

    The worker creates it. The ranks, and neighbours (workers of the same user on the same host), open it by the
    worker's process id and file descriptor. It is sparse: what was never written takes no memory. It cannot shrink, so
    that a mapping stays readable.
    """

    def __init__(self, fd: int, size_bytes: int, *, is_writable: bool = True) -> None:
        self._fd = fd
        self.size_bytes = size_bytes
        try:
            self.map = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0))
        except (OSError, ValueError):
            os.close(fd)
            raise
        try:
            self.map.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            log.debug("KV store: no transparent huge pages: %s", error)

    @classmethod
    def create(cls, size_bytes: int) -> StoreMemory:
        """Make the memory.

        Raises:
            OSError: the machine does not have this much memory available.
        """
        available = available_bytes()
        if size_bytes > available:
            raise OSError(
                errno.ENOMEM,
                f"a KV store of {size_bytes / GIB:.1f} GiB does not fit: {available / GIB:.1f} GiB of memory are "
                "available here; make the store smaller",
            )
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size_bytes)
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)
        log.info("KV store: %.1f GiB of host memory, %s", size_bytes / GIB, _kind_of_shared_pages())
        return cls(fd, size_bytes)

    @classmethod
    def open(cls, process_id: int, fd: int, size_bytes: int) -> StoreMemory:
        """Map the memory of another process. Raises `OSError` if that process has ended."""
        return cls(os.open(f"/proc/{process_id}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), size_bytes)

    @classmethod
    def of_neighbour(cls, process_id: int, fd: int, file: int, size_bytes: int) -> StoreMemory:
        """Map the store of another worker, to read it.

        Raises:
            OSError: the process has ended, or is not to be read by this one.
            ValueError: there is another file, or a store of another user.
        """
        path = Path(f"/proc/{process_id}/fd/{fd}")
        if not str(path.readlink()).startswith(f"/memfd:{_NAME}"):
            raise ValueError("there is no KV store")
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(opened)
        if (found.st_uid, found.st_ino, found.st_size) != (os.getuid(), file, size_bytes):
            os.close(opened)
            raise ValueError("it is another KV store, or that of another user")
        return cls(opened, size_bytes, is_writable=False)

    @property
    def place(self) -> tuple[int, int, int]:
        """Process id, file descriptor and size in bytes, for `open` elsewhere."""
        return os.getpid(), self._fd, self.size_bytes

    @property
    def place_for_neighbours(self) -> Place:
        """For `of_neighbour` elsewhere."""
        return os.getpid(), self._fd, os.fstat(self._fd).st_ino, self.size_bytes

    @property
    def address(self) -> int:
        """Where the memory starts in this process."""
        return addressof(c_char.from_buffer(self.map))

    def close(self) -> None:
        """Unmap. Views that are still alive keep the mapping until they go."""
        try:
            self.map.close()
        except BufferError:
            return
        finally:
            os.close(self._fd)


def default_size_bytes(workers_here: int, root: Path = _ROOT) -> int:
    """The store's size where none is given: a worker's share of half of the memory that is available.

    Args:
        workers_here: workers that share this machine and start at about the same time.
        root: of the file system with /proc and /sys.
    """
    return max(MINIMUM_BYTES, available_bytes(root) // 2 // workers_here)


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that can still be used: what the kernel has, or what the cgroups leave, whichever is less."""
    kernel_bytes = _numbers(root / "proc/meminfo")["MemAvailable:"] * 1024
    return min([kernel_bytes, *_left_by_cgroups(root)])


def _left_by_cgroups(root: Path) -> Iterator[int]:
    """Bytes that each limit on this process leaves, of both versions of cgroups, from its group to the root.

    A group's file cache counts as left, because the kernel drops it when memory is needed.
    """
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            tree, limit, usage, cache = "sys/fs/cgroup", "max", "current", "inactive_file"
        elif "memory" in controllers.split(","):
            tree, limit = "sys/fs/cgroup/memory", "limit_in_bytes"
            usage, cache = "usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = Path(path.lstrip("/"))
        for place in [root / tree / folder for folder in (group, *group.parents)]:
            limit_file = place / f"memory.{limit}"
            # A container has its own group at the root of the tree, and nothing at the path that the kernel names.
            most = limit_file.read_text().strip() if limit_file.exists() else "max"
            if most != "max":
                used = int((place / f"memory.{usage}").read_text())
                yield max(0, int(most) - used + _numbers(place / "memory.stat").get(cache, 0))


def _numbers(path: Path) -> dict[str, int]:
    """Lines of the kind "name number ..." in a file of the kernel; nothing if there is no such file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) > 1}


def _kind_of_shared_pages() -> str:
    """The pages that the kernel gives to shared memory whose user asks for huge ones."""
    setting = _ROOT / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    text = setting.read_text() if setting.exists() else "[never]"
    if "[never]" in text or "[deny]" in text:
        return f"small pages, because {setting} turns huge ones off"
    return "transparent huge pages"


# -- The messages between a worker and the ranks of its engine, and how they are encoded
#
# Keys of pages travel as one string of bytes per pool, because a long context has thousands of them.


class Records(Struct, array_like=True, frozen=True):
    """Records of one pool.

    Attributes:
        keys: joined; see `split`.
        offsets: where each record starts in the store.
    """

    keys: bytes
    offsets: list[int]


class Hello(Struct, tag=True, frozen=True):
    """A rank has mapped the store.

    Attributes:
        geometry: equal on all ranks.
        warnings: one line each, for the worker's log.
    """

    rank: int
    geometry: KvGeometry
    warnings: list[str] = []


class Refused(Struct, tag=True, frozen=True):
    """A rank cannot exchange the KV of its engine, and ends. `reason`: one line."""

    rank: int
    reason: str


class Offer(Struct, tag=True, frozen=True):
    """Pages that SGLang offers to the store, by pool. All ranks are offered the same; rank 0 reports it."""

    number: int
    session_id: str
    keys: dict[str, bytes]


class Write(Struct, tag=True, frozen=True):
    """What to copy of an offer: by pool, positions in the offered keys, and offsets in the store.

    `records` is None for an offer that was refused.
    """

    number: int
    records: dict[str, tuple[list[int], list[int]]] | None


class Written(Struct, tag=True, frozen=True):
    """A rank has copied its part of an offer.

    `digest` is of the offered keys, which must be equal on all ranks; empty if the copy failed.
    """

    number: int
    digest: bytes


class Forgotten(Struct, tag=True, frozen=True):
    """The rank's cache was reset: offers below `below` that it has not written, it never will."""

    below: int


class Allow(Struct, tag=True, frozen=True):
    """What a request may load, by pool, instead of what it might before.

    The rank answers with `Done` when no load of what the request might load before runs.

    Attributes:
        until_s: a load that has not ended then (`time.monotonic`) fails.
    """

    call: int
    rid: str
    records: dict[str, Records]
    until_s: Annotated[float, Meta(ge=0)] = math.inf


class Drop(Struct, tag=True, frozen=True):
    """A request loads nothing any more. The rank answers with `Done` when no load of it runs."""

    call: int
    rid: str


class Map(Struct, tag=True, frozen=True):
    """Map the store of a neighbour, so that requests may load from it. The rank answers with `Done`."""

    call: int
    number: Positive
    place: Place


class Unmap(Struct, tag=True, frozen=True):
    """Nothing is loaded from a neighbour any more."""

    number: Positive


class Settle(Struct, tag=True, frozen=True):
    """The rank answers with `Done`, and in it how many offers there were so far."""

    call: int


class Loaded(Struct, tag=True, frozen=True):
    """The records of these requests were copied to the device, in one go. `seconds`: how long that took."""

    rids: list[str]
    seconds: float


class Passes(Struct, tag=True, frozen=True):
    """The engine has begun a pass over these prefills.

    `parts`: of each, its request, the tokens that are left of it after the pass, and whether this is its last pass,
    beside a decode batch.
    """

    parts: list[tuple[str, int, bool]]


class PassFactors(Struct, tag=True, frozen=True):
    """What the times of passes are multiplied by from now on. Rank 0 measures them."""

    factors: Factors


class Done(Struct, tag=True, frozen=True):
    """The answer to a call. `refusal`: why nothing was done, in one line; empty: it was."""

    call: int
    offers: int = 0
    refusal: str = ""


ToRank = Write | Allow | Drop | Map | Unmap | Settle
ToWorker = Hello | Refused | Offer | Written | Forgotten | Loaded | Passes | PassFactors | Done

encode = Encoder().encode
decode_to_rank = Decoder(ToRank).decode
decode_to_worker = Decoder(ToWorker).decode
"""It raises `ValueError` for anything else than a message to the worker, and `decode_to_rank` than one to a rank."""


def split(keys: bytes) -> list[bytes]:
    """Joined keys, one by one."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
