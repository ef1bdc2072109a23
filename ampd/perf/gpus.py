"""Presets of GPUs in their usual servers: published peaks, and assumptions about the network."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ampd.errors import UserError, did_you_mean
from ampd.perf.number_format import NumberFormat

_MIB = 2**20

HOST_LINK_SHARE = 0.8
"""The share of the peak between GPU and host that large copies are assumed to reach."""

PCIE_4_BYTES_PER_S = 32e9
PCIE_5_BYTES_PER_S = 64e9
PCIE_6_BYTES_PER_S = 128e9
"""A slot of 16 lanes, one direction."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak figures of an accelerator in its server.

    Attributes:
        flops_per_s: dense bf16 matrix operations.
        fp8_flops_per_s, fp4_flops_per_s: the same with 8 and 4 bits; 0: the GPU does not have them.
        memory_bytes: as the driver reports it.
        link_bytes_per_s: to its peers in the server, one direction.
        network_bytes_per_s: to other servers, one direction; the GPU's share of the server's cards.
        host_bytes_per_s: to the memory of its host, one direction.
    """

    name: str
    flops_per_s: float
    fp8_flops_per_s: float
    fp4_flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    host_bytes_per_s: float

    def flops_for(self, weights: NumberFormat) -> float:
        """The peak with which engines multiply with weights of a format. Without its data type they unpack it."""
        peaks = {"bf16": self.flops_per_s, "fp8": self.fp8_flops_per_s, "fp4": self.fp4_flops_per_s}
        return peaks[weights.computes] if peaks[weights.needs] else self.flops_per_s


GPUS: dict[str, Gpu] = {
    "h20": Gpu("NVIDIA H20", 148e12, 296e12, 0, 97_871 * _MIB, 4.0e12, 450e9, 25e9, PCIE_5_BYTES_PER_S),
    "h20-3e": Gpu("NVIDIA H20 3e", 148e12, 296e12, 0, 143_771 * _MIB, 4.8e12, 450e9, 25e9, PCIE_5_BYTES_PER_S),
    "a100": Gpu("NVIDIA A100 SXM 80 GB", 312e12, 0, 0, 81_920 * _MIB, 2.039e12, 300e9, 25e9, PCIE_4_BYTES_PER_S),
    "a100-40gb": Gpu("NVIDIA A100 SXM 40GB", 312e12, 0, 0, 40_960 * _MIB, 1.555e12, 300e9, 25e9, PCIE_4_BYTES_PER_S),
    "a100-pcie": Gpu("NVIDIA A100 PCIe 80 GB", 312e12, 0, 0, 81_920 * _MIB, 1.935e12, 32e9, 25e9, PCIE_4_BYTES_PER_S),
    "a100-pcie-40gb": Gpu(
        "NVIDIA A100 PCIe 40GB", 312e12, 0, 0, 40_960 * _MIB, 1.555e12, 32e9, 25e9, PCIE_4_BYTES_PER_S
    ),
    "h100": Gpu("NVIDIA H100 SXM", 989.4e12, 1979e12, 0, 81_559 * _MIB, 3.35e12, 450e9, 50e9, PCIE_5_BYTES_PER_S),
    "h100-nvl": Gpu("NVIDIA H100 NVL", 835e12, 1671e12, 0, 95_830 * _MIB, 3.9e12, 300e9, 50e9, PCIE_5_BYTES_PER_S),
    "h100-pcie": Gpu("NVIDIA H100 PCIe", 756e12, 1513e12, 0, 81_559 * _MIB, 2.0e12, 64e9, 50e9, PCIE_5_BYTES_PER_S),
    "h800": Gpu("NVIDIA H800 SXM", 989.4e12, 1979e12, 0, 81_559 * _MIB, 3.35e12, 200e9, 50e9, PCIE_5_BYTES_PER_S),
    "h200": Gpu("NVIDIA H200 SXM", 989.4e12, 1979e12, 0, 143_771 * _MIB, 4.8e12, 450e9, 50e9, PCIE_5_BYTES_PER_S),
    "h200-nvl": Gpu("NVIDIA H200 NVL", 835e12, 1671e12, 0, 143_771 * _MIB, 4.8e12, 450e9, 50e9, PCIE_5_BYTES_PER_S),
    "l40s": Gpu("NVIDIA L40S", 362e12, 733e12, 0, 46_068 * _MIB, 0.864e12, 32e9, 25e9, PCIE_4_BYTES_PER_S),
    "b200": Gpu("NVIDIA B200 SXM", 2250e12, 4500e12, 9000e12, 183_359 * _MIB, 8.0e12, 900e9, 50e9, PCIE_5_BYTES_PER_S),
    "b300": Gpu(
        "NVIDIA B300 SXM", 2250e12, 4500e12, 13_500e12, 275_040 * _MIB, 8.0e12, 900e9, 100e9, PCIE_6_BYTES_PER_S
    ),
    "gb200": Gpu("NVIDIA GB200", 2500e12, 5000e12, 10_000e12, 189_471 * _MIB, 8.0e12, 900e9, 50e9, 225e9),
    "mi300x": Gpu("AMD MI300X", 1307.4e12, 2614.9e12, 0, 196_592 * _MIB, 5.3e12, 448e9, 50e9, PCIE_5_BYTES_PER_S),
}
"""Compute, memory and links as the vendors publish them. PCIe cards count without NVLink bridges, which join two only.

The network is an assumption: 400 Gb/s a GPU, 200 Gb/s for A100 and L40S, 800 Gb/s for B300, and for H20 as in arXiv
2602.14516. Host memory is reached over the PCIe generation of the card; two GPUs of a GB200 share the link of a CPU.
"""


def host_bytes_per_s(description: str) -> float:
    """The peak rate between a GPU and its host, one direction, by the PCIe generation of the preset that a text names.

    For any other accelerator it is that of PCIe 4.0.
    """
    name = preset_of(description)
    return GPUS[name].host_bytes_per_s if name else PCIE_4_BYTES_PER_S


def preset_of(description: str) -> str | None:
    """The name of the preset that a text names, such as a GPU's name in nvidia-smi or rocm-smi; None: none.

    It is the one with the most words that are all in the text: an `H100 NVL` is no `H100`.
    """
    words = set(re.findall(r"[a-z0-9]+", description.lower()))
    named = [name for name in GPUS if set(name.split("-")) <= words]
    return max(named, key=lambda name: name.count("-"), default=None)


def gpu(name: str) -> Gpu:
    """A GPU by the name of its preset.

    Raises:
        UserError: an unknown name; the known ones are listed.
    """
    if found := GPUS.get(name.lower()):
        return found
    raise UserError(f"unknown GPU {name!r}; known: {', '.join(sorted(GPUS))}{did_you_mean(name, GPUS)}")
