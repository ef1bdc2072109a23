"""What a reader needs to read the store of another worker; it travels in the answer to a lease."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass

from workers.kv.geometry import KvGeometry

_HEADER = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A store for its readers.

    Attributes:
        address, size_bytes: where the store lies in its worker's memory.
        agent: the metadata of its NIXL agent.
    """

    geometry: KvGeometry
    address: int
    size_bytes: int
    agent: bytes

    def encode(self) -> bytes:
        fields = {"geometry": self.geometry.to_json(), "address": self.address, "size_bytes": self.size_bytes}
        header = json.dumps(fields).encode()
        return _HEADER.pack(len(header)) + header + self.agent


def decode_descriptor(data: bytes) -> Descriptor:
    """The counterpart of `Descriptor.encode`. Raises `ValueError` for anything else."""
    try:
        (length,) = _HEADER.unpack_from(data)
        fields = json.loads(data[_HEADER.size : _HEADER.size + length])
        geometry = KvGeometry.from_json(fields["geometry"])
        address, size_bytes = int(fields["address"]), int(fields["size_bytes"])
    except (struct.error, TypeError, KeyError, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a KV descriptor: {error}") from None
    if address < 0 or size_bytes < 0:
        raise ValueError("not a KV descriptor: a negative address or size")
    return Descriptor(geometry, address, size_bytes, data[_HEADER.size + length :])
