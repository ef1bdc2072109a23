"""Workers under a load, for tests of pools policies."""

import math
from dataclasses import replace
from typing import TypeVar

from hypothesis import strategies as st

from ampd.perf.presets import load_performance_model
from ampd.policies.registry import Policy
from ampd.types import Parallelism, PrefillTask, Role, Slo, Window, WorkerView

MODEL = load_performance_model("qwen3-32b-h20")
SLO = Slo(ttft_s=1.0, itl_s=0.04)
TP4 = Parallelism(4)
NEVER = -math.inf
EMPTY = Window()
LATE = Window(0.05, 100)
"""Token intervals above the target."""


PoolsT = TypeVar("PoolsT", bound=Policy)


def with_constants(policy: type[PoolsT], **values: float) -> PoolsT:
    """The policy, with other values of its constants."""
    return type(f"Changed{policy.__name__}", (policy,), {"__module__": __name__, **values})()


def waiting(*incr_tokens: int, hist_tokens: int = 0) -> tuple[PrefillTask, ...]:
    return tuple(
        PrefillTask(f"t{index}", f"s{index}", hist_tokens, tokens, 0.0, SLO) for index, tokens in enumerate(incr_tokens)
    )


def prefill(name: str, *queue: int, batch: int = 0, ttft: Window = EMPTY, label: str = "") -> WorkerView:
    return WorkerView(
        name,
        Role.PREFILL,
        TP4,
        waiting(*queue),
        ttft,
        decode_batch=batch,
        decode_context_tokens=1000 * batch,
        label=label,
    )


def decode(name: str, batch: int = 0, itl: Window = EMPTY, kv_tokens: int = 0) -> WorkerView:
    return WorkerView(
        name,
        Role.DECODE,
        TP4,
        itl=itl,
        decode_batch=batch,
        decode_context_tokens=1000 * batch,
        kv_capacity_tokens=kv_tokens,
    )


LONG = 4000
OVERLOADED = prefill("p", *[LONG] * 6)
"""Several seconds of work: a prefill that comes now misses a target of one second."""
CARRIED = next(n for n in range(1, 4096) if MODEL.decode_step_s(n + 1, 1000 * (n + 1), TP4) > SLO.itl_s)
"""Sequences of 1000 tokens that one of these workers decodes within the target."""


def lanes(*names: str) -> list[WorkerView]:
    return [prefill(f"p{number}", label=label) for number, label in enumerate(names)]


tasks = st.lists(
    st.builds(
        lambda number, hist, incr: PrefillTask(f"t{number}", f"s{number}", hist, incr, 0.0, SLO),
        st.integers(0, 5),
        st.integers(0, 20_000),
        st.integers(1, 20_000),
    ),
    max_size=5,
).map(tuple)
windows = st.builds(Window, st.floats(0, 5), st.integers(0, 50)).map(
    lambda window: window if window.count else Window()
)


@st.composite
def loads(draw: st.DrawFn, worker: WorkerView) -> WorkerView:
    batch = draw(st.integers(0, 60))
    return replace(
        worker,
        queue=draw(tasks),
        ttft=draw(windows),
        itl=replace(draw(windows), mean_s=draw(st.floats(0, 0.1))),
        decode_batch=batch,
        decode_context_tokens=batch * draw(st.integers(1, 20_000)),
        held_tokens=draw(st.dictionaries(st.sampled_from(["s0", "s1"]), st.integers(1, 20_000))),
    )
