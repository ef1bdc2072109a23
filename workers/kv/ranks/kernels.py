"""The kernel that moves KV between the slots of a rank's pools and scratch memory in the order of records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kv.ranks.pools import head_bytes

_BLOCK_UNITS = 1024
_ALIGNMENT = 16
"""A thread moves so many bytes at once, where the tensors allow it."""
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["tensors", "slots", "layers"])  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    tensors,
    slots,
    scratch,
    layers,
    heads: tl.constexpr,
    parts: tl.constexpr,
    head_units: tl.constexpr,
    start: tl.constexpr,
    size: tl.constexpr,
    item: tl.constexpr,
    inner: tl.constexpr,
    slot_stride: tl.constexpr,
    head_stride: tl.constexpr,
    outer_stride: tl.constexpr,
    inner_stride: tl.constexpr,
    alignment: tl.constexpr,
    block: tl.constexpr,
    to_pool: tl.constexpr,
):
    """One head of one slot in one tensor. All sizes and strides are in units of the type of `scratch`."""
    of_record = tl.program_id(0).to(tl.int64)  # a record's head
    tensor = tl.program_id(1)
    unit = tl.program_id(2) * block + tl.arange(0, block)
    slot = tl.load(slots + of_record // heads)
    pool = tl.load(tensors + tensor).to(tl.pointer_type(scratch.dtype.element_ty))
    pool = tl.multiple_of(pool, alignment) + slot * slot_stride + of_record % heads * head_stride
    number = unit // item
    pool += number // inner * outer_stride + number % inner * inner_stride + unit % item
    scratch += (of_record * layers + tensor // parts) * head_units + start + tensor % parts * size + unit
    mask = unit < size
    if to_pool:
        tl.store(pool, tl.load(scratch, mask=mask), mask=mask)
    else:
        tl.store(scratch, tl.load(pool, mask=mask), mask=mask)


class Kernels:
    """The launches that move a section: one where the tensors of a layer are alike, as K and V mostly are.

    They are compiled at once: the first slot is moved to scratch memory and back.

    Args:
        layers: for each layer, tensors [slot, head, ...] whose bytes follow each other for each head.
    """

    def __init__(self, layers: Sequence[Sequence[Tensor]]) -> None:
        self._launches: list[tuple[int, Tensor, dict[str, int]]] = []
        of_head, start = sum(map(head_bytes, layers[0])), 0
        for _, alike in groupby(range(len(layers[0])), lambda part: _layout(layers[0][part])):
            parts = list(alike)
            tensors = [of_layer[part] for of_layer in layers for part in parts]
            self._launches.append((len(parts), *launch_of(tensors, len(parts), of_head, start)))
            start += len(parts) * head_bytes(tensors[0])
        first = torch.zeros(1, dtype=torch.int64, device=layers[0][0].device)
        scratch = torch.empty(layers[0][0].shape[1] * of_head, dtype=torch.uint8, device=first.device)
        for to_pool in (False, True):
            self.move(first, scratch, 0, 1, to_pool=to_pool)

    def move(self, slots: Tensor, scratch: Tensor, first: int, layers: int, *, to_pool: bool) -> None:
        """Move some layers of slots from scratch memory [slot, head, layer, bytes], or to it."""
        for parts, tensors, constants in self._launches:
            unit, blocks = constants["unit"], -(-constants["size"] // constants["block"])
            grid = len(slots) * constants["heads"], layers * parts, blocks
            sizes = {name: value for name, value in constants.items() if name != "unit"}
            bits = scratch.view(_UNITS[unit])
            _move[grid](tensors[first * parts :], slots, bits, layers, **sizes, to_pool=to_pool)


def launch_of(tensors: Sequence[Tensor], parts: int, of_head: int, start: int) -> tuple[Tensor, dict[str, int]]:
    """The addresses of alike tensors, and the kernel's constants for them."""
    item, (slot, head, *strides), (_, heads, *inner) = _layout(tensors[0])
    if len(inner) > 2:
        raise ValueError(f"no kernel moves tensors of the shape {tuple(tensors[0].shape)}")
    size = head_bytes(tensors[0])
    outer_stride, inner_stride, *_ = (*strides, 0, 0)
    addresses = [tensor.data_ptr() for tensor in tensors]
    in_bytes = {
        "head_units": of_head,
        "start": start,
        "size": size,
        "item": item,
        "slot_stride": slot,
        "head_stride": head,
        "outer_stride": outer_stride,
        "inner_stride": inner_stride,
    }
    unit = math.gcd(8, *addresses, *in_bytes.values())
    constants = {name: value // unit for name, value in in_bytes.items()}
    constants |= {"unit": unit, "heads": heads, "parts": parts, "inner": [*inner, 1, 1][1]}
    constants |= {"alignment": math.gcd(_ALIGNMENT, *addresses)}
    constants["block"] = min(_BLOCK_UNITS, triton.next_power_of_2(constants["size"]))
    return torch.tensor(addresses, dtype=torch.int64).to(tensors[0].device), constants


def _layout(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Of a tensor [slot, head, ...]: contiguous bytes, and the strides in bytes and sizes of the axes around them."""
    item = int(tensor.element_size())
    shape = [int(size) for size in tensor.shape]
    strides = [int(stride) * item for stride in tensor.stride()]
    while len(shape) > 2 and (shape[-1] == 1 or strides[-1] == item):
        item *= shape.pop()
        strides.pop()
    return item, tuple(strides), tuple(shape)
