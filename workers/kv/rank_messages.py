"""The messages between a worker and the ranks of its engine, and how they are encoded.

Keys of pages travel as one string of bytes per pool, because a long context has thousands of them.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from ampd.page_keys import KEY_BYTES
from workers.kv.geometry import KvGeometry


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
    """What a request may load, by pool. The rank answers with `Done`."""

    call: int
    rid: str
    records: dict[str, Records]


class Drop(Struct, tag=True, frozen=True):
    """A request loads nothing any more. The rank answers with `Done` when no load of it runs."""

    call: int
    rid: str


class Settle(Struct, tag=True, frozen=True):
    """The rank answers with `Done`, and in it how many offers there were so far."""

    call: int


class Loaded(Struct, tag=True, frozen=True):
    """The records of these requests were copied to the device, in one go. `seconds`: how long that took."""

    rids: list[str]
    seconds: float


class Passes(Struct, tag=True, frozen=True):
    """The engine has begun a pass over these prefills.

    `parts`: of each, its request, the tokens that were left of it, and whether this is its last pass, beside a step of
    the batch.
    """

    parts: list[tuple[str, int, bool]]


class Done(Struct, tag=True, frozen=True):
    """The answer to a call."""

    call: int
    offers: int = 0


ToRank = Write | Allow | Drop | Settle
ToWorker = Hello | Refused | Offer | Written | Forgotten | Loaded | Passes | Done

encode = Encoder().encode
decode_to_rank = Decoder(ToRank).decode
decode_to_worker = Decoder(ToWorker).decode
"""It raises `ValueError` for anything else than a message to the worker, and `decode_to_rank` than one to a rank."""


def split(keys: bytes) -> list[bytes]:
    """Joined keys, one by one."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
