"""A load beside a step that still writes its slots, in orders in which a GPU may run the two."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.harness.fake_streams import FakeDevice  # noqa: E402
from tests.workers.kv.ranks.copies_lab import (  # noqa: E402
    BF16,
    LAYERS,
    SLOTS,
    Lab,
    cut_short,
    gated_delta,
    mha,
    same_bits,
    sliding_window,
    slots_of,
)
from workers.kv.ranks.copies import PageLoader, Pipeline  # noqa: E402
from workers.kv.ranks.pools import PoolBuffers  # noqa: E402

ORDERS = 25
FAMILIES: Mapping[str, Any] = {
    "attention": lambda: mha(4, BF16),
    "windows": lambda: sliding_window(BF16),
    "states": lambda: gated_delta(BF16),
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Copies that are made from now on have its streams, and little scratch memory."""
    device = FakeDevice()
    cut_short(monkeypatch)
    monkeypatch.setattr(torch, "get_device_module", lambda _where: device)
    monkeypatch.setattr(Pipeline, "launch", lambda *args: device.launch(*args))
    return device


class Case:
    """A rank with a loader, and a step that was launched before a load and still writes its slots.

    Args:
        step_on: the stream of the step, `scheduler` or `forward`.
        told: the stream of the forward that the loader is told.
    """

    def __init__(self, device: FakeDevice, lab: Lab, step_on: str, told: str) -> None:
        device.streams.clear()
        device.may_wait.clear()
        self.device, self.lab = device, lab
        self.streams = {name: device.Stream() for name in ("scheduler", "forward", "another")}
        self.buffers, self.wanted = lab.shard(2, 1), lab.shard(2, 1)
        self.copies = lab.copies(self.buffers, 2, 1)
        self.released: list[tuple[str, bool]] = []
        link: Any = self
        self.loader = PageLoader(self.copies, link, self.streams[told])
        self.streams[step_on].work += [partial(self.write, tensor) for _, tensor in slots_of(self.buffers)]

    def write(self, tensor: Any) -> None:
        tensor[SLOTS] = 7

    def loaded(self, rids: list[str], _seconds: float) -> None:
        self.rids = rids

    def end_load(self, rid: str) -> None:
        self.released.append((rid, all(stream.done == len(stream.work) for stream in self.device.streams)))

    def load(self) -> list[bool]:
        """Load and compute; returns a list that gets for each layer whether it was right when it was read."""
        found: list[bool] = []
        with self.device.stream(self.streams["scheduler"]):
            self.loader.queue("r", {pool: (SLOTS, offsets) for pool, offsets in self.lab.offsets.items()})
            index = self.loader.start()
        self.loader.set_consumer(index)
        with self.device.stream(self.streams["forward"]):
            for layer in range(LAYERS):
                self.loader.wait_until(layer)
                self.streams["forward"].work.append(partial(self.look, layer, found))
            assert self.loader.finish(index)
        return found

    def look(self, layer: int, found: list[bool]) -> None:
        found.append(self.is_right(layer))

    def is_right(self, layer: int) -> bool:
        pairs = zip(of_layer(self.buffers, layer), of_layer(self.wanted, layer), strict=True)
        return all(same_bits(ours[SLOTS], theirs[SLOTS]) for ours, theirs in pairs)

    def close(self) -> None:
        self.device.may_wait.set()
        self.loader.close()


def of_layer(buffers: Mapping[str, PoolBuffers], layer: int) -> list[Any]:
    return [
        tensor
        for pool in buffers.values()
        if layer in pool.layer_ids
        for layers in pool.sections.values()
        for tensor in layers[pool.layer_ids.index(layer)]
    ]


def outcomes(device: FakeDevice, lab: Lab, step_on: str, told: str) -> list[bool]:
    """Whether the slots are right at the end, and were when the forward read them, in each order."""
    right = []
    for seed in range(ORDERS):
        case = Case(device, lab, step_on, told)
        found = case.load()
        device.run_all(Random(seed))
        case.close()
        right.append(found == [True] * LAYERS and all(map(case.is_right, range(LAYERS))))
        assert case.released == [("r", True)]
    return right


@pytest.fixture(params=FAMILIES)
def lab(request: pytest.FixtureRequest) -> Lab:
    lab = Lab(*FAMILIES[request.param]())
    lab.write(1)
    return lab


@pytest.mark.parametrize("step_on", ["forward", "scheduler"])
def test_in_no_order_does_a_step_overwrite_a_load_or_a_layer_begin_before_it(
    lab: Lab, device: FakeDevice, step_on: str
) -> None:
    assert all(outcomes(device, lab, step_on, told="forward"))


def test_a_load_that_waits_for_another_stream_is_overwritten_in_some_orders(lab: Lab, device: FakeDevice) -> None:
    """The control: the orders are there."""
    right = outcomes(device, lab, "forward", told="another")
    assert right.count(False) > 0


def test_no_thread_of_the_engine_waits_for_a_load(lab: Lab, device: FakeDevice) -> None:
    case = Case(device, lab, "forward", "forward")
    case.load()
    assert not any(stream.done for stream in device.streams)
    assert set(device.waited) <= {"ampd-kv-load"}
    assert not case.released
    device.run_all(Random(1))
    case.close()
    assert case.released == [("r", True)]


def test_a_load_that_is_forgotten_has_ended(lab: Lab, device: FakeDevice) -> None:
    case = Case(device, lab, "forward", "forward")
    case.load()
    device.may_wait.set()
    case.loader.reset()
    assert all(map(case.is_right, range(LAYERS)))
    case.close()


def test_loads_one_after_the_other_use_the_scratch_memory_in_turn(lab: Lab, device: FakeDevice) -> None:
    for seed in range(ORDERS):
        case = Case(device, lab, "forward", "forward")
        found = [case.load(), case.load()]
        device.run_all(Random(seed))
        case.close()
        assert found == [[True] * LAYERS] * 2
        assert case.released == [("r", True)] * 2


def test_a_write_ends_with_its_bytes_in_the_store(lab: Lab, device: FakeDevice) -> None:
    wanted = lab.store.clone()
    lab.write(2)
    assert lab.store.equal(wanted)
    assert set(device.waited) == {"MainThread"}
