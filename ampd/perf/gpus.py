"""Presets of GPUs in their usual servers: published peaks, assumptions about the network, and the memory for KV."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ampd.errors import UserError
from ampd.perf.model_shape import ModelShape

# -- presets of GPUs in their usual servers: published peaks, and assumptions about the network

_MIB = 2**20

HOST_LINK_SHARE = 0.8
"""The share of the peak between GPU and host that large copies are assumed to reach."""

PCIE_4_BYTES_PER_S = 32e9
PCIE_5_BYTES_PER_S = 64e9
"""A slot of 16 lanes, one direction."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak figures of an accelerator in its server.

    Attributes:
        flops_per_s: dense bf16 matrix operations.
        memory_bytes: as the driver reports it.
        link_bytes_per_s: to its peers in the server, one direction.
        network_bytes_per_s: to other servers, one direction; the GPU's share of the server's cards.
        host_bytes_per_s: to the memory of its host, one direction.
    """

    name: str
    flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    host_bytes_per_s: float


GPUS: dict[str, Gpu] = {
    "h20": Gpu("NVIDIA H20", 148e12, 97_871 * _MIB, 4.0e12, 450e9, 25e9, PCIE_5_BYTES_PER_S),
    "a100": Gpu("NVIDIA A100 SXM 80 GB", 312e12, 81_920 * _MIB, 2.039e12, 300e9, 25e9, PCIE_4_BYTES_PER_S),
    "h100": Gpu("NVIDIA H100 SXM", 989.4e12, 81_559 * _MIB, 3.35e12, 450e9, 50e9, PCIE_5_BYTES_PER_S),
    "h800": Gpu("NVIDIA H800 SXM", 989.4e12, 81_559 * _MIB, 3.35e12, 200e9, 50e9, PCIE_5_BYTES_PER_S),
    "h200": Gpu("NVIDIA H200 SXM", 989.4e12, 143_771 * _MIB, 4.8e12, 450e9, 50e9, PCIE_5_BYTES_PER_S),
    "l40s": Gpu("NVIDIA L40S", 362e12, 46_068 * _MIB, 0.864e12, 32e9, 25e9, PCIE_4_BYTES_PER_S),
    "b200": Gpu("NVIDIA B200 SXM", 2250e12, 183_359 * _MIB, 8.0e12, 900e9, 50e9, PCIE_5_BYTES_PER_S),
}
"""Compute, memory and links as the vendor publishes them (L40S: PCIe 4.0 x16, it has no NVLink).

The network is an assumption: 400 Gb/s a GPU, 200 Gb/s for A100 and L40S, and for H20 as in arXiv 2602.14516.
Host memory is reached over the PCIe generation of the card.
"""


def host_bytes_per_s(description: str) -> float:
    """The peak rate between a GPU and its host, one direction, by the PCIe generation of the preset that a text names.

    For any other accelerator it is that of PCIe 4.0.
    """
    name = preset_of(description)
    return GPUS[name].host_bytes_per_s if name else PCIE_4_BYTES_PER_S


def preset_of(description: str) -> str | None:
    """The name of the preset that a text names, such as a GPU's name in the driver; None: none."""
    words = re.findall(r"[a-z0-9]+", description.lower())
    return next((word for word in words if word in GPUS), None)


def gpu(name: str) -> Gpu:
    """A GPU by the name of its preset.

    Raises:
        UserError: an unknown name; the known ones are listed.
    """
    if found := GPUS.get(name.lower()):
        return found
    raise UserError(f"unknown GPU {name!r}; known: {', '.join(sorted(GPUS))}")


# -- the KV memory of a replica: the memory that its weights leave free


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """The part of a GPU's memory for weights and KV: a share of it, minus a reserve for activations and graphs."""

    usable_share: float = 0.9
    reserve_bytes: float = 2e9


MEMORY_SHARE = MemoryShare()


def kv_capacity_tokens(shape: ModelShape, gpu: Gpu, tp: int, share: MemoryShare = MEMORY_SHARE) -> int:
    """KV tokens of one replica beside its weights; 0 or negative: the weights leave no room."""
    free_bytes = share.usable_share * gpu.memory_bytes - share.reserve_bytes - shape.weight_bytes / tp
    return int(free_bytes // (shape.kv_bytes_per_token / shape.kv_shards(tp)))
