"""Copies between ranks and records, on synthetic tensors: any TP writes, any TP loads."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.workers.kv.ranks.copies_lab import (  # noqa: E402
    BF16,
    FAMILIES,
    PAGE,
    PAGES,
    SLOTS,
    TPS,
    Lab,
    cut_short,
    differences,
    gated_delta,
    heads_of,
    mha,
    random,
    same_bits,
    slots_of,
)
from workers.kv.engine_store import checksum_of  # noqa: E402
from workers.kv.ranks.copies import RankSection  # noqa: E402
from workers.kv.ranks.pools import (  # noqa: E402
    PoolBuffers,
    attention_buffers,
    pool_geometry,
    state_buffers,
)
from workers.kv.shared import NEIGHBOUR_BYTES, head_share  # noqa: E402


@pytest.fixture(
    params=["CPU", "cut short", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("GPU", "GPU, cut short"))]
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All ways to copy."""
    if "cut short" in request.param:
        cut_short(monkeypatch)
    if request.param.startswith("GPU"):
        with torch.device("cuda"):
            yield
    else:
        yield


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) if name.startswith("GDN fp32") else name for name in FAMILIES]
)
def test_any_tp_loads_what_any_tp_wrote(family: str) -> None:
    lab = Lab(*FAMILIES[family]())
    stores = []
    for writer in TPS:
        lab.write(writer)
        stores.append(lab.store.clone())
        for loader in TPS:
            for rank in range(loader):
                assert not differences(lab.loaded(loader, rank), lab.shard(loader, rank)), (writer, loader, rank)
    assert all(earlier.equal(later) for earlier, later in pairwise(stores))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) if name.startswith("GDN fp32") else name for name in FAMILIES]
)
def test_records_are_loaded_from_a_neighbours_store_and_from_the_own_together(family: str) -> None:
    lab = Lab(*FAMILIES[family]())
    lab.write(2)
    whole = lab.store.clone()
    # Each store has only the records that are loaded from it.
    for pool in lab.geometry.pools:
        for number, offset in enumerate(lab.offsets[pool.name]):
            (whole if number % 2 else lab.store)[offset : offset + pool.record_bytes] = 0
    for tp in TPS:
        for rank in range(tp):
            assert not differences(lab.loaded(tp, rank, neighbour=whole), lab.shard(tp, rank)), (tp, rank)
    assert differences(lab.loaded(1, 0), lab.shard(1, 0))


def test_nothing_is_loaded_from_a_neighbour_that_has_gone() -> None:
    lab = Lab(*mha(4, BF16))
    lab.write(1)
    copies = lab.copies(lab.shard(1, 0), 1, 0)
    copies.add_neighbour(3, lab.store)
    load = {"kv": (SLOTS, [3 * NEIGHBOUR_BYTES + offset for offset in lab.offsets["kv"]])}
    copies.load(load)
    assert copies.remove_neighbour(3) is not None
    assert copies.remove_neighbour(3) is None
    with pytest.raises(KeyError):
        copies.load(load)
    copies.load({"kv": (SLOTS, lab.offsets["kv"])})


@pytest.mark.parametrize("family", [name for name in FAMILIES if "MLA" not in name and "1 head" not in name])
def test_the_heads_of_another_rank_differ(family: str) -> None:
    """The control of the test above: its comparison sees a wrong head."""
    lab = Lab(*FAMILIES[family]())
    lab.write(2)
    assert differences(lab.loaded(2, 0, as_rank=1), lab.shard(2, 0))


def test_naively_joined_channels_differ() -> None:
    """The control of the convolution's sections: as one section of 16 heads, what TP 2 writes is wrong at TP 1."""
    shard, _ = gated_delta(BF16)

    def joined(tp: int, rank: int) -> Mapping[str, PoolBuffers]:
        states = shard(tp, rank)["mamba"].sections
        conv = [
            torch.cat([part.flatten(1) for (part,) in layer], dim=1).unflatten(1, (16 // tp, -1))
            for layer in zip(*(states[f"conv_{name}"] for name in "qkv"), strict=True)
        ]
        return {"mamba": PoolBuffers((0, 1, 2, 4, 5), {"conv": [(layer,) for layer in conv]})}

    lab = Lab(joined, [pool_geometry("mamba", joined(1, 0)["mamba"], {"conv": 16}, 1)])
    lab.write(2)
    assert not differences(lab.loaded(2, 1), joined(2, 1))
    assert differences(lab.loaded(1, 0), joined(1, 0))


def test_other_slots_and_other_bytes_stay_as_they_are() -> None:
    lab = Lab(*mha(4, BF16))
    lab.write(1)
    bytes_of_records = torch.zeros_like(lab.store, dtype=torch.bool)
    for offset in lab.offsets["kv"]:
        bytes_of_records[offset : offset + lab.geometry.pools[0].record_bytes] = True
    assert not lab.store[~bytes_of_records].any()
    buffers = lab.shard(2, 1)
    for _, tensor in slots_of(buffers):
        tensor.fill_(7)
    lab.copies(buffers, 2, 1).load({"kv": ([0], lab.offsets["kv"][:1])})
    assert all((tensor[1:] == 7).all() for _, tensor in slots_of(buffers))


def test_k_and_v_may_share_a_storage() -> None:
    whole = random(2, PAGES * PAGE, 4, 16, dtype=BF16)
    pools = [pool_geometry("kv", attention_buffers([whole[0]], [whole[1]], PAGE, [0]), {"kv": 4})]

    def shard(tp: int, rank: int) -> Mapping[str, PoolBuffers]:
        mine = heads_of(whole, tp, rank, 2)
        return {"kv": attention_buffers([mine[0]], [mine[1]], PAGE, [0])}

    lab = Lab(shard, pools)
    lab.write(4)
    assert not differences(lab.loaded(2, 1), shard(2, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_checksums_do_not_depend_on_tp(family: str) -> None:
    lab = Lab(*FAMILIES[family]())
    for pool in lab.geometry.pools:
        offset = lab.offsets[pool.name][2]
        record = memoryview(lab.store.numpy())[offset : offset + pool.record_bytes]
        found: list[int] = []
        for tp in TPS:
            lab.store.zero_()
            lab.write(tp)
            found.append(checksum_of(record))
        assert found == found[:1] * len(TPS)


def test_buffers_that_do_not_fit_are_refused() -> None:
    shard, pools = mha(8, BF16)
    lab = Lab(shard, pools)
    with pytest.raises(ValueError, match=r"4 heads and 256 bytes .* section kv \(2 heads on this rank, 256 bytes"):
        lab.copies(shard(2, 0), 4, 0)
    few = shard(1, 0)["kv"]
    with pytest.raises(ValueError, match="5 layers of buffers, 6 in a record"):
        lab.copies({"kv": PoolBuffers(few.layer_ids[:5], {"kv": few.sections["kv"][:5]})}, 1, 0)
    with pytest.raises(ValueError, match="3 heads cannot be divided over 2 ranks"):
        Lab(*mha(3, BF16)).copies(shard(2, 0), 2, 0)
    with pytest.raises(ValueError, match="the convolution has 8 channels on a rank, but q, k and v have 6"):
        state_buffers(torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 8, 3), dict.fromkeys("qkv", (1, 2)), [0])


def test_records_must_be_aligned_and_as_many_as_slots() -> None:
    lab = Lab(*mha(8, BF16))
    copies = lab.copies(lab.shard(1, 0), 1, 0)
    with pytest.raises(ValueError, match="1 slots, 1 records; each starts at a multiple of 8 bytes"):
        copies.write("kv", [1], [4])
    with pytest.raises(ValueError, match="2 slots, 1 records"):
        copies.load({"kv": ([1, 2], [0])})


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kernels of a GPU, in Triton's interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = importlib.reload(importlib.import_module("workers.kv.ranks.kernels"))
    yield module
    monkeypatch.undo()
    importlib.reload(module)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_move_the_bytes_that_torch_moves(kernels: Any, family: str) -> None:
    lab, slots = Lab(*FAMILIES[family]()), torch.tensor(SLOTS[:2])
    for tp in TPS:
        buffers = lab.shard(tp, tp - 1)
        for pool in lab.geometry.pools:
            for section in pool.sections:
                ours = RankSection(pool, section, buffers[pool.name], head_share(section.heads, tp, tp - 1))
                at = (1, 2) if section.layers > 2 else (0, section.layers)
                moved = []
                for move in (ours.move, kernels.Kernels(ours.layers).move):
                    size = len(slots) * ours.share.count * at[1] * ours.head_bytes
                    gathered, scattered = torch.zeros(2, size, dtype=torch.uint8)
                    scattered.copy_(torch.arange(size))
                    before = [tensor.clone() for tensors in ours.layers for tensor in tensors]
                    move(slots, gathered, *at, to_pool=False)
                    move(slots, scattered, *at, to_pool=True)
                    after = [tensor for tensors in ours.layers for tensor in tensors]
                    moved.append([gathered, *(tensor.clone() for tensor in after)])
                    for tensor, old in zip(after, before, strict=True):
                        tensor.copy_(old)
                assert all(map(same_bits, *moved)), (tp, section.name)
                assert moved[0][0].any()
