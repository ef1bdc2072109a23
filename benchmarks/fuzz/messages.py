"""What processes send to each other: requests, records of the shared state, answers about KV, reports."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import msgspec
from msgspec import msgpack

from ampd.call_signatures import SIGNATURE, SignatureFault, Signer, Verifier
from ampd.cli.top import snapshot_of
from ampd.keys import pack_tokens
from ampd.perf.presets import load_performance_model
from ampd.policies import defaults
from ampd.policies.registry import create_named
from ampd.round_end import (
    Begun,
    PrefillFailed,
    RoundEnded,
    Running,
    Told,
    cut_told,
    encode_told,
)
from ampd.serving.local_only import uncarried_option
from ampd.serving.placement import PlacementPolicies, prefill_task
from ampd.state import codec
from ampd.state.codec import SnapshotReader
from ampd.state.redis_store import StateStore
from ampd.state.store import (
    Heard,
    Overview,
    RoleAssigned,
    SessionEnded,
    TaskDone,
    TaskQueued,
    WorkerRemoved,
    WorkerUpdated,
)
from ampd.state.view import ClusterView
from ampd.types import CoordinatorView, Parallelism, PrefillTask, Role, Route, Slo, Window, WorkerView
from ampd.wire import RoundReport, parse_error
from benchmarks.fuzz.mutations import changed, changed_bytes, changed_json, changed_text
from benchmarks.fuzz.target import Target
from router.decision_record import DecisionRecord
from router.request import link, parse_round
from router.round_errors import RoundRefusedError
from router.targets import TargetLimits
from workers.kv.peer_reads import Descriptor, decode_descriptor, encode_descriptor
from workers.kv.shared import KvGeometry, PoolGeometry, Section, mismatch

_SLO = Slo(2.0, 0.1)
LIMITS = TargetLimits(_SLO)
VOCABULARY = 1000
REQUEST: dict[str, Any] = {
    "model": "m",
    "token_ids": [5, 6, 7, 8] * 8,
    "stop_conditions": {
        "max_tokens": 5,
        "min_tokens": 1,
        "stop": ["x"],
        "stop_token_ids_hidden": [3],
        "ignore_eos": False,
    },
    "sampling_options": {"n": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "presence_penalty": 0.0},
    "output_options": {"logprobs": 2, "skip_special_tokens": True},
    "eos_token_ids": [2, 3],
    "annotations": ["ttft_target:350", "x"],
    "agent_context": {"session_id": "agent-7", "session_final": False, "kv_hints": {}},
    "router": {"ttft_target": 350.0, "itl_target": 40.0},
    "routing": {"cache_salt": "tenant", "priority": 1},
    "extra_args": {"nvext": {"extra_fields": ["engine_data"]}},
}
_CONTINUED: dict[str, Any] = {
    "token_ids": [5, 6, 7, 8] * 8,
    "stop_conditions": {"max_tokens": 5, "min_tokens": 6},
    "sampling_options": {"n": 1, "temperature": 0.0},
    "agent_context": {"session_id": "agent-7"},
    "migration_link": link("ab" * 16, 28, 7),
}
_TASK = PrefillTask("t1", "0" * 32, 160, 40, 0.0, _SLO)
_VIEW = WorkerView(
    "d1", Role.DECODE, Parallelism(1), (_TASK,), Window(0.1, 3), Window(0.02, 90), 2, 4000, 5000, 100_000, 32_000,
    {"0" * 32: 160, "1" * 32: 32}, store_used_tokens=9, store_capacity_tokens=100,
)  # fmt: skip
_PREFILL = WorkerView("p1", Role.PREFILL, Parallelism(1), kv_capacity_tokens=100_000, max_context_tokens=32_000)
_ROLE = RoleAssigned("d1", Role.PREFILL, "short", "ttft-short")
_EVENTS = (
    WorkerUpdated(_VIEW, 5.0), WorkerUpdated(_PREFILL, None), WorkerRemoved("d1"), WorkerRemoved("p1", is_expired=True),
    TaskQueued("d1", _TASK), TaskDone("d1", "t1"), SessionEnded("0" * 32), _ROLE,
)  # fmt: skip
_MOST_WORKERS = 20
_REPORT: dict[str, Any] = {
    **dict.fromkeys(("held_tokens", "cached_tokens", "kv_read_tokens", "kv_read_bytes"), 160),
    **dict.fromkeys(("queued_s", "prefill_s", "kv_read_s", "reload_s"), 0.5),
    "hit_tokens": {"device": 80, "peer": 80}, "decode_batch": 3, "decode_context_tokens": 5000, "kv_read_error": "gone",
}  # fmt: skip
_ENDED = RoundEnded("r1", "complete", tokens=b"\1\0\0\0", has_begun=True, ttft_s=0.1, decode=cast(RoundReport, _REPORT))
_TOLD: tuple[Told, ...] = (
    Begun("r1"), PrefillFailed("r1", "p1", "lost", "gone", status=503), _ENDED, Running("d1", ["r1", "r2"]),
)  # fmt: skip
_UNDAMAGED = 0.7
_MODEL = load_performance_model("tiny-cpu")
_SECTIONS = (Section("k", 2, 4, 128), Section("v", 2, 4, 128))
_GEOMETRY = KvGeometry("f" * 64, 16, (PoolGeometry("kv", _SECTIONS), PoolGeometry("swa", _SECTIONS, 4)))


def targets() -> Iterator[Target]:
    """The receivers of messages that need no running worker."""
    yield Target("request", lambda rng: changed(rng, REQUEST, 4), _place_request, (RoundRefusedError,))
    yield Target("continued request", lambda rng: changed(rng, _CONTINUED, 4), _place_request, (RoundRefusedError,))
    yield Target("session headers", _headers, _place_request, (RoundRefusedError,))
    yield _record("view", codec.encode_view(_VIEW, 0.0), lambda text: _decide(codec.decode_view(text, 0.0)))
    yield _record("task", codec.encode_task(_TASK, 0.0), lambda text: _order(codec.decode_task(text, 0.0)))
    yield _record("role", codec.encode_role(_ROLE), codec.decode_role)
    events = [codec.encode_event(event, 0.0) for event in _EVENTS]
    yield Target("event", lambda rng: _text(rng, rng.choice(events)), Listener().take, (codec.CodecError,))
    coordinator = codec.encode_coordinator(CoordinatorView("c1", _SLO, rounds_in_progress=3))
    yield _record("coordinator", coordinator, lambda text: _show(codec.decode_coordinator(text)))
    yield Target("snapshot", _stored, _read_stored, (codec.CodecError,))
    yield Target("round report", lambda rng: changed(rng, _REPORT, 4), _take_report, (ValueError,))
    yield Target("end of a round", _told, _read_told, (ValueError,))
    yield Target("error text", _error_text, parse_error, ())
    yield Target("signature", _signed, _verify, ())
    yield Target("descriptor", _descriptor, _read_descriptor, (ValueError,))


def _record(name: str, text: bytes, run: Callable[[bytes], Any]) -> Target:
    return Target(name, lambda rng: _text(rng, text), run, (codec.CodecError,))


def _text(rng: random.Random, text: bytes) -> bytes:
    data = changed_json(rng, json.loads(text)).encode("utf-8", "surrogatepass")
    return changed_bytes(rng, data) if rng.random() < 0.1 else data


# -- requests


def _headers(rng: random.Random) -> dict[str, Any]:
    text = changed_text(rng, "agent-7")
    agent = {
        "session_id": rng.choice((text, text * rng.choice((1, 100)))),
        "session_final": rng.choice((True, False, "x")),
    }
    routing = {"cache_salt": rng.choice((None, "", "tenant", text, text * 100))}
    return {"token_ids": [1, 2], "agent_context": changed(rng, agent, 1), "routing": changed(rng, routing, 1)}


def _place_request(request: dict[str, Any]) -> None:
    wanted = parse_round(request, LIMITS, VOCABULARY)
    assert wanted.session_id.isascii()
    assert len(wanted.session_id) <= 64
    assert LIMITS.floor * 2.0 <= wanted.slo.ttft_s <= LIMITS.cap * 2.0
    assert LIMITS.floor * 0.1 <= wanted.slo.itl_s <= LIMITS.cap * 0.1
    assert len(pack_tokens(wanted.token_ids)) == 4 * len(wanted.token_ids)
    assert max(wanted.token_ids) < VOCABULARY
    assert wanted.max_tokens is None or wanted.max_tokens >= 0
    assert wanted.choices >= 1
    assert wanted.uncarried == uncarried_option(request)
    assert 0 <= wanted.client_prompt_tokens <= len(wanted.token_ids)
    assert 0 <= wanted.continued_mark < 1 << 32


# -- the shared state


def _decide(view: WorkerView) -> None:
    """Bind a session and route its round, with this worker among others."""
    healthy = WorkerView("d9", Role.DECODE, kv_capacity_tokens=100_000, max_context_tokens=32_000)
    policies = PlacementPolicies(
        create_named("binding", defaults.BINDING), create_named("routing", defaults.ROUTING), _MODEL, random.Random(1),
        lambda _: None,
    )  # fmt: skip
    task = prefill_task("t", "s", 200, 0, arrival_s=0.0, slo=_SLO, session_missed=False)
    assert policies.bind(task, (view, healthy), 1.0) in (view.worker_id, "d9")
    decision = policies.route(task, view, (_PREFILL, view), 1.0, lost=(), local_only=None)
    assert decision.worker_id in (view.worker_id, "p1")
    assert (decision.route is Route.LOCAL) == (decision.worker_id == view.worker_id)
    _top(Overview([Heard(view, 0.1)], []))


def _order(task: PrefillTask) -> None:
    assert task.incr_tokens >= 0
    assert task.hist_tokens >= 0


class Listener:
    """A coordinator's view of the workers, which hears all events one after the other."""

    def __init__(self) -> None:
        self._now_s = 0.0
        # It is not connected, so that it asks nothing of a store.
        self._view = ClusterView(
            cast(StateStore, None),
            lease_s=5.0,
            clock=lambda: self._now_s,
            model=_MODEL,
        )

    def take(self, text: bytes) -> None:
        """Apply an event, if it is one, and ask what a round asks."""
        event = codec.decode_event(text, self._now_s)
        self._now_s += 0.01
        self._view.apply(event)
        if isinstance(event, WorkerUpdated):
            assert event.lease_s is None or 0 <= event.lease_s < float("inf")
            _decide(event.view)
            assert self._view.knows(event.view.worker_id)
        workers = self._view.workers()
        assert len({worker.worker_id for worker in workers}) == len(workers)
        assert all(worker.queued_prefills >= 0 for worker in workers)
        for worker in workers[_MOST_WORKERS:]:
            self._view.apply(WorkerRemoved(worker.worker_id))


def _show(view: CoordinatorView) -> None:
    _top(Overview([], [Heard(view, 0.1)]))


def _top(overview: Overview) -> None:
    """Text and JSON of `ampd top`."""
    snapshot = snapshot_of(overview, 1.0, _MODEL) | {"namespace": "n", "place": "p", "at_s": 0.0}
    json.dumps(snapshot)


def _stored(rng: random.Random) -> tuple[bytes, list[bytes]]:
    view = b"1700000000000 " + _text(rng, codec.encode_view(_VIEW, 0.0))
    change = b"1700000000000 " + _text(rng, codec.encode_task(_TASK, 0.0))
    if rng.random() < 0.3:
        view, change = changed_bytes(rng, view), changed_bytes(rng, change)
    return view, [rng.choice((b"t1", b"\xff", b"")), rng.choice((change, b"1700000000000 ", b""))]


def _read_stored(given: tuple[bytes, list[bytes]]) -> None:
    _decide(SnapshotReader(1_700_000_000_500, time.monotonic()).worker(*given))


# -- between coordinators and workers


def _error_text(rng: random.Random) -> str:
    text = 'Backend<Unknown>: {"message": "ampd-error 503: the engine is starting", "code": 503}'
    return changed_text(rng, changed_text(rng, text))


def _told(rng: random.Random) -> bytes:
    told = rng.choice(_TOLD)
    data = encode_told(told, Signer((), "d1"), "c1")
    with suppress(OverflowError, TypeError, UnicodeError):  # of values that cannot be sent
        fields = changed(rng, msgspec.to_builtins(told, builtin_types=(bytes,)), 3)
        data = encode_told(fields, Signer((), "d1"), "c1")
    return data if rng.random() < _UNDAMAGED else changed_bytes(rng, data)


def _read_told(data: bytes) -> None:
    for told in cut_told(bytearray(data), Verifier((), "c1")):
        if isinstance(told, RoundEnded) and told.decode:
            msgspec.convert(told.decode, RoundReport)


def _take_report(value: Any) -> None:
    """Into the decision record that a client gets, and into the view of the next decisions."""
    report = msgspec.convert(value, RoundReport)
    record = DecisionRecord("s", "p", Slo(1.0, 0.1))
    record.measures.prefilled(report)
    record.measures.read_increment(report)
    json.dumps(record.as_dict(), allow_nan=False)
    batch: dict[str, Any] = {name: report[name] for name in ("decode_batch", "decode_context_tokens") if name in report}
    view = replace(_VIEW, held_tokens={"0" * 32: report["held_tokens"]}, **batch)
    _decide(codec.decode_view(codec.encode_view(view, 0.0), 0.0))


_CALL = {"op": "lease", "keys": [b"k" * 32], "ttl_s": 5.0, "session_id": "s"}


def _signed(rng: random.Random) -> tuple[dict[str, str], Any]:
    metadata: dict[str, str] = {}
    Signer((b"k" * 32,), "worker-a").sign(metadata, "kv", "d1", _CALL)
    if rng.random() < 0.5:
        metadata[SIGNATURE] = changed_text(rng, metadata[SIGNATURE])
        return metadata, _CALL
    return metadata, changed(rng, _CALL)


def _verify(given: tuple[dict[str, str], Any]) -> None:
    metadata, message = given
    refusal = Verifier((b"k" * 32,), "d1").refusal(metadata, "kv", message)
    assert refusal is not None or message == _CALL or _equal(message)
    assert refusal is None or refusal in SignatureFault


def _equal(message: Any) -> bool:
    """Whether a message means the same on the wire: 5 and 5.0, for example."""
    return isinstance(message, dict) and str(message) == str(_CALL)


def _descriptor(rng: random.Random) -> bytes:
    data = encode_descriptor(Descriptor(_GEOMETRY, 4096, 1 << 20, b"agent"))
    if rng.random() < 0.4:
        return changed_bytes(rng, data)
    try:
        return msgpack.encode(changed(rng, msgpack.decode(data)))
    except (OverflowError, UnicodeEncodeError, RecursionError):  # msgpack has no such value
        return changed_bytes(rng, data)


def _read_descriptor(data: bytes) -> None:
    descriptor = decode_descriptor(data)
    assert descriptor.address >= 0
    if mismatch(_GEOMETRY, descriptor.geometry) is None:
        assert descriptor.geometry == _GEOMETRY
