"""Copies between ranks and records, on synthetic tensors: any TP writes, any TP loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from workers.kv.checksums import checksum_of  # noqa: E402
from workers.kv.geometry import KvGeometry, PoolGeometry, head_share  # noqa: E402
from workers.kv.rank_process import rank_copies  # noqa: E402
from workers.kv.rank_process.pool_buffers import (  # noqa: E402
    PoolBuffers,
    attention_buffers,
    latent_buffers,
    pool_geometry,
    state_buffers,
)
from workers.kv.rank_process.rank_copies import RankCopies  # noqa: E402
from workers.kv.rank_process.section_copies import GpuCopies  # noqa: E402

PAGE, PAGES, LAYERS = 4, 7, 6
TPS = (1, 2, 4, 8)
SLOTS = [5, 1, 2, 3, 6]
"""Device slots, in the order of the records: with neighbours and without."""

Shard = Callable[[int, int], Mapping[str, PoolBuffers]]
"""TP and rank to the buffers of that rank, which hold the model's KV."""


def random(*shape: int, dtype: Any) -> Any:
    """Any bits at all: a copy must keep those of NaN, too."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)


def heads_of(whole: Any, tp: int, rank: int, axis: int) -> Any:
    """A rank's heads of a tensor with all heads."""
    share = head_share(whole.shape[axis], tp, rank)
    return whole.narrow(axis, share.first, share.count).clone()


def attention(heads: int, dim: int, v_dim: int, layers: list[int], dtype: Any) -> Callable[[int, int], PoolBuffers]:
    # One slot more than whole pages: SGLang's pools have slots that belong to no page.
    keys = [random(PAGES * PAGE + 1, heads, dim, dtype=dtype) for _ in layers]
    values = [random(PAGES * PAGE + 1, heads, v_dim, dtype=dtype) for _ in layers]
    return lambda tp, rank: attention_buffers(
        [heads_of(key, tp, rank, 1) for key in keys], [heads_of(value, tp, rank, 1) for value in values], PAGE, layers
    )


def mha(heads: int, dtype: Any, dim: int = 16, v_dim: int = 16) -> tuple[Shard, list[PoolGeometry]]:
    pool = attention(heads, dim, v_dim, list(range(LAYERS)), dtype)
    return lambda tp, rank: {"kv": pool(tp, rank)}, [pool_geometry("kv", pool(1, 0), {"kv": heads})]


def mla(dtype: Any) -> tuple[Shard, list[PoolGeometry]]:
    latents = [random(PAGES * PAGE, 1, 24, dtype=dtype) for _ in range(LAYERS)]

    def shard(_tp: int, _rank: int) -> Mapping[str, PoolBuffers]:
        return {"kv": latent_buffers([latent.clone() for latent in latents], PAGE, range(LAYERS))}

    return shard, [pool_geometry("kv", shard(1, 0)["kv"], {"latent": 1})]


def sliding_window(dtype: Any) -> tuple[Shard, list[PoolGeometry]]:
    full, window = attention(2, 32, 16, [1, 4], dtype), attention(8, 8, 8, [0, 2, 3, 5], dtype)
    geometry = [pool_geometry("kv", full(1, 0), {"kv": 2}), pool_geometry("swa", window(1, 0), {"kv": 8}, 3)]
    return lambda tp, rank: {"kv": full(tp, rank), "swa": window(tp, rank)}, geometry


def gated_delta(dtype: Any, transposed: bool = False) -> tuple[Shard, list[PoolGeometry]]:
    """Qwen3-Next: states of fp32 and a convolution over the channels of q, k and v."""
    q_heads, v_heads, q_dim, v_dim, layers = 8, 16, 8, 16, [0, 1, 2, 4, 5]
    full = attention(2, 16, 16, [3], dtype)
    temporal = random(len(layers), PAGES, v_heads, v_dim, q_dim, dtype=torch.float32)
    q, k = (random(len(layers), PAGES, q_heads, q_dim * 3, dtype=dtype) for _ in range(2))
    v = random(len(layers), PAGES, v_heads, v_dim * 3, dtype=dtype)

    def shard(tp: int, rank: int) -> Mapping[str, PoolBuffers]:
        parts = [heads_of(part, tp, rank, 2).reshape(len(layers), PAGES, -1, 3) for part in (q, k, v)]
        convolution = torch.cat(parts, dim=2)
        if transposed:  # SGLang's layout for CPUs with AMX: channels are neighbours
            convolution = convolution.transpose(2, 3).contiguous().transpose(2, 3)
        channels = {"q": (q_heads // tp, q_dim), "k": (q_heads // tp, q_dim), "v": (v_heads // tp, v_dim)}
        states = state_buffers(heads_of(temporal, tp, rank, 2), convolution, channels, layers)
        return {"kv": full(tp, rank), "mamba": states}

    heads = {"temporal": v_heads, "conv_q": q_heads, "conv_k": q_heads, "conv_v": v_heads}
    geometry = [pool_geometry("kv", full(1, 0), {"kv": 2}), pool_geometry("mamba", shard(1, 0)["mamba"], heads, 1)]
    return shard, geometry


BF16, FP8, FP32 = torch.bfloat16, torch.uint8, torch.float32
FAMILIES: dict[str, Callable[[], tuple[Shard, list[PoolGeometry]]]] = {
    "8 heads bf16": lambda: mha(8, BF16),
    "16 heads fp8": lambda: mha(16, FP8),
    "4 heads fp32": lambda: mha(4, FP32),
    "2 heads bf16": lambda: mha(2, BF16),
    "1 head fp8": lambda: mha(1, FP8),
    "K and V differ": lambda: mha(4, BF16, 24, 8),
    "MLA bf16": lambda: mla(BF16),
    "MLA fp8": lambda: mla(FP8),
    "SWA bf16": lambda: sliding_window(BF16),
    "GDN bf16": lambda: gated_delta(BF16),
    "GDN fp32, transposed": lambda: gated_delta(FP32, transposed=True),
}


class Lab:
    """A store with the records of some slots of a model.

    Records of different pools alternate, so that those of one pool are not all neighbours.
    """

    def __init__(self, shard: Shard, pools: list[PoolGeometry]) -> None:
        self.shard = shard
        self.geometry = KvGeometry("f", PAGE, tuple(pools))
        self.offsets: dict[str, list[int]] = {pool.name: [] for pool in pools}
        at = 64
        for number in range(len(SLOTS)):
            for pool in pools:
                self.offsets[pool.name].append(at)
                at += pool.record_bytes + (64 if number == 1 else 0)
        self.store = torch.zeros(at + 64, dtype=torch.uint8)

    def copies(self, buffers: Mapping[str, PoolBuffers], tp: int, rank: int) -> RankCopies:
        return RankCopies(self.geometry, buffers, self.store, tp=tp, rank=rank, layers=LAYERS)

    def write(self, tp: int) -> None:
        self.store.fill_(0)
        for rank in range(tp):
            copies = self.copies(self.shard(tp, rank), tp, rank)
            for pool, offsets in self.offsets.items():
                copies.write(pool, SLOTS, offsets)

    def loaded(self, tp: int, rank: int, as_rank: int | None = None) -> Mapping[str, PoolBuffers]:
        """The buffers of a rank after a load into zeroed slots; `as_rank`: with the heads of another."""
        buffers = self.shard(tp, rank)
        for _, tensor in slots_of(buffers):
            tensor[SLOTS] = 0
        copies = self.copies(buffers, tp, rank if as_rank is None else as_rank)
        layers = list(copies.load({pool: (SLOTS, offsets) for pool, offsets in self.offsets.items()}))
        assert layers == list(range(LAYERS))
        return buffers


def slots_of(buffers: Mapping[str, PoolBuffers]) -> list[tuple[str, Any]]:
    return [
        (f"{pool} {section} {layer}", tensor)
        for pool, pool_buffers in buffers.items()
        for section, layers in pool_buffers.sections.items()
        for layer, tensors in enumerate(layers)
        for tensor in tensors
    ]


def differences(ours: Mapping[str, PoolBuffers], theirs: Mapping[str, PoolBuffers]) -> list[str]:
    pairs = zip(slots_of(ours), slots_of(theirs), strict=True)
    return [name for (name, mine), (_, other) in pairs if not same_bits(mine, other)]


def same_bits(first: Any, second: Any) -> bool:
    return first.contiguous().view(torch.uint8).equal(second.contiguous().view(torch.uint8))


@pytest.fixture(params=["host", "gpu"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to copy. That of a GPU runs here on the host, with batches and groups of layers that are cut short."""
    if request.param == "gpu":
        monkeypatch.setattr(rank_copies, "_copies", lambda section, store: GpuCopies(section, store, 5000, 700))


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
