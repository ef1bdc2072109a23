"""Copies between ranks and records, on synthetic tensors: any TP writes, any TP loads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from tests.waiting import PATIENCE_S  # noqa: E402
from tests.workers.kv.ranks.copies_lab import (  # noqa: E402
    BF16,
    FAMILIES,
    LAYERS,
    PAGE,
    PAGES,
    SLOTS,
    TPS,
    Lab,
    differences,
    gated_delta,
    heads_of,
    mha,
    random,
    same_bits,
    sliding_window,
    slots_of,
)
from workers.kv.engine_store import checksum_of  # noqa: E402
from workers.kv.ranks import copies  # noqa: E402
from workers.kv.ranks.copies import GpuCopies  # noqa: E402
from workers.kv.ranks.pools import (  # noqa: E402
    PoolBuffers,
    attention_buffers,
    pool_geometry,
    state_buffers,
)
from workers.kv.shared import NEIGHBOUR_BYTES  # noqa: E402


def _cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's way to copy, with batches and groups of layers that are cut short."""
    monkeypatch.setattr(copies, "_copies", lambda section, store: GpuCopies(section, store, 5000, 700))


@pytest.fixture(
    params=["host", "as on a GPU", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("GPU", "GPU, cut short"))]
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All ways to copy. `as on a GPU` has its tensors on the host."""
    if request.param in ("as on a GPU", "GPU, cut short"):
        _cut_short(monkeypatch)
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
    loading = copies.load(load)
    next(loading)
    removal = threading.Thread(target=copies.remove_neighbour, args=(3,))
    removal.start()
    assert len(list(loading)) == LAYERS - 1
    removal.join(PATIENCE_S)
    with pytest.raises(KeyError):
        next(copies.load(load))


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
    list(lab.copies(buffers, 2, 1).load({"kv": ([0], lab.offsets["kv"][:1])}))
    assert all((tensor[1:] == 7).all() for _, tensor in slots_of(buffers))


def test_a_layer_is_complete_when_it_is_yielded() -> None:
    lab = Lab(*sliding_window(BF16))
    lab.write(1)
    buffers, wanted = lab.shard(2, 1), lab.shard(2, 1)
    for _, tensor in slots_of(buffers):
        tensor.fill_(0)
    loads = {pool: (SLOTS, offsets) for pool, offsets in lab.offsets.items()}
    for layer in lab.copies(buffers, 2, 1).load(loads):
        for pool in ("kv", "swa"):
            for index, number in enumerate(buffers[pool].layer_ids):
                landed = [tensor[SLOTS] for tensor in buffers[pool].sections["kv"][index]]
                if number <= layer:
                    expected = [tensor[SLOTS] for tensor in wanted[pool].sections["kv"][index]]
                    assert all(same_bits(*pair) for pair in zip(landed, expected, strict=True))
                else:
                    assert not any(part.any() for part in landed)


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
        list(copies.load({"kv": ([1, 2], [0])}))
