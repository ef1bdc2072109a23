"""Presets of GPUs in their usual servers: published peaks, and assumptions about the network."""

from __future__ import annotations

from dataclasses import dataclass

from ampd.errors import UserError

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak figures of an accelerator in its server.

    Attributes:
        flops_per_s: dense bf16 matrix operations.
        memory_bytes: as the driver reports it.
        link_bytes_per_s: to its peers in the server, one direction.
        network_bytes_per_s: to other servers, one direction; the GPU's share of the server's cards.
    """

    name: str
    flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float


GPUS: dict[str, Gpu] = {
    "h20": Gpu("NVIDIA H20", 148e12, 97_871 * _MIB, 4.0e12, 450e9, 25e9),
    "a100": Gpu("NVIDIA A100 SXM 80 GB", 312e12, 81_920 * _MIB, 2.039e12, 300e9, 25e9),
    "h100": Gpu("NVIDIA H100 SXM", 989.4e12, 81_559 * _MIB, 3.35e12, 450e9, 50e9),
    "h800": Gpu("NVIDIA H800 SXM", 989.4e12, 81_559 * _MIB, 3.35e12, 200e9, 50e9),
    "h200": Gpu("NVIDIA H200 SXM", 989.4e12, 143_771 * _MIB, 4.8e12, 450e9, 50e9),
    "l40s": Gpu("NVIDIA L40S", 362e12, 46_068 * _MIB, 0.864e12, 32e9, 25e9),
    "b200": Gpu("NVIDIA B200 SXM", 2250e12, 183_359 * _MIB, 8.0e12, 900e9, 50e9),
}
"""Compute, memory and links as the vendor publishes them (L40S: PCIe 4.0 x16, it has no NVLink).

The network is an assumption: 400 Gb/s a GPU, 200 Gb/s for A100 and L40S, and for H20 as in arXiv 2602.14516.
"""


def gpu(name: str) -> Gpu:
    """A GPU by the name of its preset.

    Raises:
        UserError: an unknown name; the known ones are listed.
    """
    if found := GPUS.get(name.lower()):
        return found
    raise UserError(f"unknown GPU {name!r}; known: {', '.join(sorted(GPUS))}")
