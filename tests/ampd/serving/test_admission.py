"""Admission: running sessions first, and no wait far beyond the target."""

import random
from typing import Any

from ampd.errors import UserError
from ampd.perf.model import PerformanceModel
from ampd.serving.admission import Admission, AdmissionSituation, Refusal, RefusalReason, is_in_progress, patience_s
from ampd.types import Parallelism, PrefillTask, Role, Slo, WorkerView

SLO = Slo(ttft_s=2.0, itl_s=0.1)
WAIT_S = 8.0 * SLO.ttft_s


class Model(PerformanceModel):
    """A prefill takes a second per 1000 new tokens, a decode step a centisecond per round."""

    def prefill_s(self, hist_tokens: int, incr_tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        if parallelism.tp > 1:
            raise UserError("only tp 1")
        return incr_tokens / 1000

    def decode_step_s(self, batch: int, context_tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        return batch / 100

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:  # noqa: ARG002
        return 0.0

    def reload_s(self, tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        return 0.0


def worker(name: str, queued_s: float = 0.0, role: Role = Role.PREFILL, **fields: Any) -> WorkerView:
    queue = (PrefillTask("t", "s", 0, int(queued_s * 1000), 0.0, SLO),) if queued_s else ()
    return WorkerView(name, role, queue=queue, **fields)


def decode(name: str = "d", queued_s: float = 1000.0, batch: int = 0) -> WorkerView:
    return worker(name, queued_s, Role.DECODE, decode_batch=batch)


def refusal(*, max_wait: float = 8.0, max_rounds: int = 100, seed: int = 1, **fields: Any) -> Refusal | None:
    admission = Admission(max_wait, max_rounds, Model(), SLO, random.Random(seed))
    situation: dict[str, Any] = {
        "prompt_tokens": 1000,
        "is_running": True,
        "decode": decode(),
        "prefill": decode(queued_s=0.0),
        "rounds": 0,
        "now_s": 0.0,
    }
    return admission.refusal(AdmissionSituation(**(situation | fields)))


def reason(**fields: Any) -> RefusalReason | None:
    refused = refusal(**fields)
    return None if refused is None else refused.reason


def test_a_first_round_is_refused_long_before_a_round_of_a_running_session() -> None:
    for queued_s, new, running in (
        (0.15 * WAIT_S, None, None),
        (0.3 * WAIT_S, RefusalReason.WAIT, None),
        (0.9 * WAIT_S, RefusalReason.WAIT, None),
        (1.1 * WAIT_S, RefusalReason.WAIT, RefusalReason.WAIT),
    ):
        prefill = worker("p", queued_s)
        assert reason(prefill=prefill, is_running=False) is new
        assert reason(prefill=prefill, is_running=True) is running


def test_the_first_prefill_of_a_session_counts_as_wait_up_to_half_of_the_longest() -> None:
    """A quarter of the longest wait is 4 s. A prompt of 60 s may still wait for 2 s."""
    for prompt_tokens, waits_s, is_refused in ((1000, 2.9, False), (1000, 3.1, True), (60_000, 1.9, False)):
        refused = reason(prefill=worker("p", waits_s), is_running=False, prompt_tokens=prompt_tokens)
        assert refused is (RefusalReason.WAIT if is_refused else None)
        assert reason(prefill=worker("p", waits_s), prompt_tokens=prompt_tokens) is None


def test_no_session_begins_where_a_round_waits_beyond_its_target() -> None:
    """The round came at 0 and its prefill takes 1 s, so that others have made it late from 3 s on."""
    for now_s, new in ((2.9, None), (3.1, RefusalReason.WAIT)):
        assert reason(prefill=worker("p", 1.0), now_s=now_s, is_running=False) is new
        assert reason(prefill=worker("p", 1.0), now_s=now_s) is None
    refused = refusal(prefill=worker("p", 1.0), now_s=3.1, is_running=False)
    assert refused is not None
    assert 1.0 <= refused.retry_after_s <= 2.0


def test_a_round_with_a_loose_target_of_its_own_may_wait_without_closing_the_door() -> None:
    loose = PrefillTask("t", "s", 0, 1000, 0.0, Slo(30.0, 0.1))
    tight = PrefillTask("t", "s", 0, 1000, 0.0, Slo(0.1, 0.1))
    for task, now_s, new in ((loose, 20.0, None), (tight, 2.9, None), (tight, 3.1, RefusalReason.WAIT)):
        assert reason(prefill=WorkerView("p", Role.PREFILL, queue=(task,)), now_s=now_s, is_running=False) is new


def test_a_client_comes_back_when_the_wait_is_short_enough_again() -> None:
    seconds = []
    for seed in range(20):
        refused = refusal(prefill=worker("p", WAIT_S + 5.0), seed=seed)
        assert refused is not None
        seconds.append(refused.retry_after_s)
    assert all(5.0 <= each <= 10.0 for each in seconds)
    assert len(set(seconds)) > 1  # not all at the same moment
    refused = refusal(prefill=worker("p", 1e6))
    assert refused is not None
    assert refused.retry_after_s == 60.0


def test_the_decode_batch_takes_its_share_of_a_decode_worker() -> None:
    assert reason(prefill=decode(queued_s=0.8 * WAIT_S)) is None
    assert reason(prefill=decode(queued_s=0.8 * WAIT_S, batch=5)) is RefusalReason.WAIT


def test_a_new_session_is_refused_if_its_decode_batch_would_be_too_large() -> None:
    full, room = decode("d1", 0.0, batch=10), decode("d2", 0.0, batch=9)
    assert reason(decode=full, is_running=False) is RefusalReason.DECODE_BATCH
    assert reason(decode=room, is_running=False) is None
    assert reason(decode=full, is_running=True) is None


def test_an_itl_target_out_of_reach_does_not_close_the_graph() -> None:
    out_of_reach = Admission(8.0, 0, Model(), Slo(2.0, 0.001), random.Random(1))
    for batch, is_refused in ((0, False), (1, False), (2, True)):
        here = decode(queued_s=0.0, batch=batch)
        situation = AdmissionSituation(
            prompt_tokens=1, is_running=False, decode=here, prefill=here, rounds=0, now_s=0.0
        )
        assert (out_of_reach.refusal(situation) is not None) == is_refused


def test_new_sessions_leave_room_among_the_rounds_in_progress() -> None:
    assert reason(rounds=74, is_running=False) is None
    assert reason(rounds=75, is_running=False) is RefusalReason.ROUNDS
    assert reason(rounds=99) is None
    assert reason(rounds=100) is RefusalReason.ROUNDS


def test_zero_is_no_bound() -> None:
    assert reason(prefill=worker("p", 1e6), max_wait=0.0, is_running=False) is None
    assert reason(rounds=10_000, max_rounds=0) is None


def test_workers_without_predicted_times_refuse_nothing() -> None:
    unknown = worker("p", 1e6, parallelism=Parallelism(8))
    assert reason(prefill=unknown, is_running=False) is None


def test_a_session_in_progress_is_known_by_its_binding_or_by_what_is_held_of_it() -> None:
    other, holder = WorkerView("d1", Role.DECODE, held_tokens={"t": 16}), WorkerView("d2", Role.DECODE)
    assert is_in_progress("s", (), is_bound=True)
    assert is_in_progress("t", (other, holder), is_bound=False)
    assert not is_in_progress("s", (other, holder), is_bound=False)


def test_a_round_with_output_waits_ten_times_as_long() -> None:
    new = PrefillTask("t", "s", 0, 10, 0.0, SLO)
    resumed = PrefillTask("t", "s", 0, 10, 0.0, SLO, has_output=True)
    assert (patience_s(new, SLO, 4.0), patience_s(resumed, SLO, 4.0)) == (16.0, 160.0)
    assert patience_s(PrefillTask("t", "s", 0, 10, 0.0, Slo(5.0, 0.1)), SLO, 4.0) == 40.0
    assert patience_s(resumed, SLO, 0.0) == float("inf")
