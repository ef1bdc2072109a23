"""The admission of rounds to this coordinator: too many end with 429 before anything of them is entered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ampd.serving.admission import Admission, AdmissionSituation, Refusal, is_in_progress
from ampd.state.view import ClusterView
from ampd.telemetry.metrics import names
from ampd.types import WorkerView
from router.round_errors import RoundOverloadedError
from router.round_window import Counts
from router.unplaced_round import UnplacedRound


class AdmissionGate:
    """Asks the admission for each round that arrives, on the local copy of the shared state.

    Args:
        rounds: rounds in progress here, the one that is checked included.
        counts: gets the rounds that are `refused`.

    Attributes:
        decisions: (`new` or `running` session, `admitted` or the reason of the refusal) -> rounds.
    """

    def __init__(self, admission: Admission, view: ClusterView, rounds: Callable[[], int], counts: Counts) -> None:
        self.decisions: Counter[tuple[str, str]] = Counter()
        self._admission = admission
        self._view = view
        self._rounds = rounds
        self._counts = counts

    def check(self, run: UnplacedRound, decode: WorkerView, prefill: WorkerView, now_s: float) -> None:
        """Let a round in, or not, that is about to be entered at a worker.

        Args:
            decode: the worker that owns its session, or would own it.
            prefill: the worker that the routing policy chose.
            now_s: on the coordinator's clock.

        Raises:
            RoundOverloadedError: it is refused because of load.
        """
        refusal, is_running = self._refusal(run, decode, prefill, now_s)
        session = names.RUNNING_SESSION if is_running else names.NEW_SESSION
        self.decisions[session, names.ADMITTED if refusal is None else refusal.reason] += 1
        if refusal is not None:
            self._counts.add("refused")
            raise RoundOverloadedError(refusal.message, refusal.retry_after_s)

    def _refusal(
        self, run: UnplacedRound, decode: WorkerView, prefill: WorkerView, now_s: float
    ) -> tuple[Refusal | None, bool]:
        """(why it is not taken, whether its session is in progress)."""
        is_bound = run.binding is not None or run.goes_on
        owners = () if is_bound else self._view.decode()
        is_running = is_in_progress(run.session_id, owners, is_bound=is_bound)
        return self._admission.refusal(
            AdmissionSituation(
                prompt_tokens=run.request.prompt_tokens,
                is_running=is_running,
                decode=decode,
                prefill=prefill,
                rounds=self._rounds() - 1,
                now_s=now_s,
            )
        ), is_running
