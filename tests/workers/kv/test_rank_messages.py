"""The messages between a worker and its ranks: each comes back equal, and nothing else is taken for one."""

from __future__ import annotations

import pytest

pytest.importorskip("msgspec")

from ampd.keys import page_keys
from ampd.types import Factors
from workers.kv import shared as messages
from workers.kv.shared import KvGeometry, PoolGeometry, Section

GEOMETRY = KvGeometry("f", 16, (PoolGeometry("kv", (Section("kv", 4, 3, 64),)),))
KEYS = page_keys(list(range(48)), 16, tenant="")

TO_RANK: list[messages.ToRank] = [
    messages.Write(3, {"kv": ([0, 2], [64, 128])}),
    messages.Write(3, None),
    messages.Allow(1, "r", {"kv": messages.Records(b"".join(KEYS), [0, 64, 128])}),
    messages.Allow(1, "r", {"kv": messages.Records(b"".join(KEYS), [0, 64, messages.NEIGHBOUR_BYTES])}, 7.5),
    messages.Map(1, 2, (3, 4, 5, 6)),
    messages.Unmap(2),
    messages.Drop(2, "r"),
    messages.Settle(4),
]
TO_WORKER: list[messages.ToWorker] = [
    messages.Hello(1, GEOMETRY, ["slow"]),
    messages.Refused(0, "another kind of KV"),
    messages.Offer(5, "s", {"kv": b"".join(KEYS)}),
    messages.Written(5, b"digest"),
    messages.Forgotten(6),
    messages.Loaded(["r"], 0.5),
    messages.Passes([("r", 700, False), ("s", 9, True)]),
    messages.PassFactors(Factors(prefill=1.5)),
    messages.Done(2, 7),
]


def test_each_message_is_decoded_equal_by_its_receiver_only() -> None:
    for message in TO_RANK:
        data = messages.encode(message)
        assert messages.decode_to_rank(data) == message
        with pytest.raises(ValueError, match="Invalid value"):
            messages.decode_to_worker(data)
    for message in TO_WORKER:
        data = messages.encode(message)
        assert messages.decode_to_worker(data) == message
        with pytest.raises(ValueError, match="Invalid value"):
            messages.decode_to_rank(data)


@pytest.mark.parametrize("data", [b"", b"\xc1", messages.encode(TO_RANK[0])[:-1]])
def test_damaged_messages_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"(?i)message|truncated|expected"):
        messages.decode_to_rank(data)


def test_joined_keys_are_split_again() -> None:
    assert messages.split(b"".join(KEYS)) == KEYS
    assert messages.split(b"") == []
