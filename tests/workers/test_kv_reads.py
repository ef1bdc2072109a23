"""KV is read from another worker where that is predicted to be faster than computing it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ampd.errors import UserError
from ampd.keys import page_keys
from ampd.perf.corrections import CorrectedModel
from ampd.perf.model import ScaledModel
from ampd.perf.presets import analytic_model
from ampd.serving import kv_tiers
from ampd.types import Parallelism
from workers.kv.exchange import KvFetch
from workers.round_progress import RoundProgress
from workers.round_service import KvReads

FETCHED = KvFetch(tokens=1)


class Kv:
    """What a worker holds already, and which reads it is asked for."""

    def __init__(self, held_pages: int) -> None:
        self.held_pages = held_pages
        self.reads: list[str] = []
        self.fetched = FETCHED
        self.may_end = asyncio.Event()
        self.may_end.set()

    def protect(self, _rid: str, keys: Sequence[bytes]) -> int:
        return min(self.held_pages, len(keys)) * 16

    async def fetch(self, *arguments: Any) -> KvFetch:
        self.reads.append(arguments[3])
        await self.may_end.wait()
        return self.fetched


class SlowLinks:
    """A model whose transfers take as long as given, from workers of TP 8 very long, and from TP 4 are not known."""

    def __init__(self, seconds: float) -> None:
        self._model = analytic_model("qwen3-32b", "h100")
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def kv_transfer_s(self, tokens: int, source: Parallelism, _target: Parallelism) -> float:
        if source.tp == 4 and tokens:
            raise UserError("no times of reads from TP 4")
        return (1e3 if source.tp == 8 else self._seconds) if tokens else 0.0


class ConstantReads(ScaledModel):
    """A model whose transfers take as long as given, times the factor of the reader."""

    def __init__(self, seconds: float) -> None:
        super().__init__(analytic_model("qwen3-32b", "h100"))
        self._seconds = seconds

    def kv_transfer_s(self, _tokens: int, _source: Parallelism, target: Parallelism) -> float:
        return self._seconds * target.factors.read


@pytest.mark.parametrize(
    ("held_pages", "expected_tokens", "transfer_s", "source_tp", "is_read"),
    [
        (0, 8000, 0.01, None, True),
        (0, 8000, 1e3, None, False),
        (500, 8000, 0.01, None, False),
        (400, 8000, 0.01, None, True),
        (0, 0, 0.01, None, False),
        (0, 8000, 0.01, 2, True),
        (0, 8000, 0.01, 8, False),
        (0, 8000, 1e3, 4, True),
    ],
)
async def test_reading_pays(
    held_pages: int, expected_tokens: int, transfer_s: float, source_tp: int | None, is_read: bool
) -> None:
    kv = Kv(held_pages)
    info = SimpleNamespace(page_size_tokens=16, parallelism=Parallelism(tp=2))
    engine = cast(Any, SimpleNamespace(kv=kv, info=info))
    keys = page_keys([1] * 8500, 16, tenant="")
    progress = RoundProgress("r", cast(Any, SimpleNamespace(session_id="s")), [1] * 8500, 0.0, keys)
    reads = KvReads(engine, CorrectedModel(cast(Any, SlowLinks(transfer_s)), info.parallelism), 5.0)
    fetched = await reads.read(progress, ("P", source_tp, ""), expected_tokens)
    assert fetched is (FETCHED if is_read else None)
    assert kv.reads == (["P"] if is_read else [])


@pytest.mark.parametrize(("host", "is_read"), [("", False), ("there", False), ("here", True)])
async def test_a_read_from_a_neighbour_pays_where_one_over_the_network_does_not(host: str, is_read: bool) -> None:
    class Network(ConstantReads):
        def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:
            return min(tokens, 0.01 if source.shares_host(target) else 1e3)

    kv, theta = Kv(0), Parallelism(tp=2, host="here")
    kv.fetched = KvFetch(tokens=8000, seconds=0.04)
    engine = cast(Any, SimpleNamespace(kv=kv, info=SimpleNamespace(page_size_tokens=16, parallelism=theta)))
    times = CorrectedModel(Network(0.01), theta)
    keys = page_keys(range(8500), 16, tenant="")
    progress = RoundProgress("r", cast(Any, SimpleNamespace(session_id="s")), [1] * 8500, 0.0, keys)
    assert (await KvReads(engine, times, 5.0).read(progress, ("P", 2, host), 8000) is not None) == is_read
    # It says nothing of reads over the network.
    assert times.parallelism.factors.read == 1.0


@pytest.mark.parametrize(
    ("reads", "transfer_s", "error", "factor"),
    [
        pytest.param(1, 0.01, None, 2.0, id="alone"),
        pytest.param(2, 0.01, None, 1.0, id="two at a time"),
        pytest.param(1, 0.01, "it failed", 1.0, id="failed"),
        pytest.param(1, 0.004, None, 1.0, id="too short"),
    ],
)
async def test_reads_alone_correct_their_times(reads: int, transfer_s: float, error: str | None, factor: float) -> None:
    kv, theta = Kv(0), Parallelism(tp=2)
    kv.fetched = KvFetch(tokens=8000, seconds=2 * transfer_s, error=error)
    engine = cast(Any, SimpleNamespace(kv=kv, info=SimpleNamespace(page_size_tokens=16, parallelism=theta)))
    times = CorrectedModel(ConstantReads(transfer_s), theta)
    kv_reads = KvReads(engine, times, 5.0)
    keys = page_keys([1] * 8500, 16, tenant="")
    progress = RoundProgress("r", cast(Any, SimpleNamespace(session_id="s")), [1] * 8500, 0.0, keys)
    for _ in range(1000):
        kv.may_end.clear()
        running = [asyncio.create_task(kv_reads.read(progress, ("P", None, ""), 8000)) for _ in range(reads)]
        await asyncio.sleep(0)
        kv.may_end.set()
        await asyncio.gather(*running)
    assert times.parallelism.factors.read == pytest.approx(factor, rel=0.05)


@pytest.mark.parametrize(
    ("expected_tokens", "transfer_s", "limit_s", "longest_s"),
    [
        pytest.param(20000, 0.01, 60.0, "computed", id="as long as computing"),
        pytest.param(8000, 0.9, 60.0, 1.8, id="twice the read"),
        pytest.param(160, 0.01, 60.0, kv_tiers.READ_FLOOR_S, id="not less than the floor"),
        pytest.param(8000, 0.9, 0.5, 0.5, id="not more than the limit"),
    ],
)
def test_how_long_a_read_may_take(
    expected_tokens: int, transfer_s: float, limit_s: float, longest_s: float | str
) -> None:
    model = cast(Any, SlowLinks(transfer_s))
    tp = Parallelism(tp=1)
    computed_s = model.prefill_s(0, 20000, tp)
    assert computed_s > kv_tiers.READ_FLOOR_S
    found_s = kv_tiers.longest_read_s(limit_s, 0, expected_tokens, model, tp, Parallelism(tp=2))
    assert found_s == (computed_s if longest_s == "computed" else longest_s)


def test_a_read_whose_time_is_not_known_may_take_as_long_as_any() -> None:
    tp = Parallelism(tp=1)
    model = cast(Any, SlowLinks(0.1))
    assert kv_tiers.longest_read_s(5.0, 0, 8000, model, tp, Parallelism(tp=4)) == 5.0
