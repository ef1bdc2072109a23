"""Refuses calls that no member of the graph has signed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ampd.call_signatures import MAX_AGE_S, SignatureFault, Verifier, claimed_caller
from workers.worker_recorder import WorkerRecorder

log = logging.getLogger(__name__)

_MAX_LOGGED = 64
"""Callers that are logged by name. A stranger may use a new name in each call."""

_REASONS = {
    SignatureFault.MISSING: "it is not signed",
    SignatureFault.WRONG: "its signature does not fit",
    SignatureFault.OLD: f"it was signed more than {MAX_AGE_S:g} s ago or ahead",
    SignatureFault.REPEATED: "the same call has come before",
}
_ADVICE = {
    SignatureFault.MISSING: "does the caller have --graph-secret-file?",
    SignatureFault.WRONG: "do both have the same secret in --graph-secret-file?",
    SignatureFault.OLD: "do the clocks of the two machines agree?",
    SignatureFault.REPEATED: "a recording may have been sent again",
}


class CallRefusedError(Exception):
    """A call was refused. `status`: the caller treats this worker as unavailable."""

    status = 503


class CallGuard:
    """Checks the calls of one worker, counts the refused ones, and logs each caller once per reason."""

    def __init__(self, verifier: Verifier, recorder: WorkerRecorder) -> None:
        self._verifier = verifier
        self._recorder = recorder
        self._logged: set[tuple[str, SignatureFault]] = set()

    def check(self, metadata: Mapping[str, str], endpoint: str, message: Any) -> None:
        """Let a call pass.

        Raises:
            CallRefusedError: no member of the graph has made it, or not now, or not for this worker.
        """
        refusal = self._verifier.refusal(metadata, endpoint, message)
        if refusal is None:
            return
        self._recorder.refused(refusal)
        self._log(claimed_caller(metadata), endpoint, refusal)
        raise CallRefusedError(f"the call was refused: {_REASONS[refusal]}")

    def _log(self, caller: str, endpoint: str, refusal: SignatureFault) -> None:
        if (caller, refusal) in self._logged or len(self._logged) > _MAX_LOGGED:
            return
        self._logged.add((caller, refusal))
        if len(self._logged) > _MAX_LOGGED:
            log.warning("calls of more callers were refused: from now on they are counted, and not logged")
            return
        log.warning(
            "a call of %s to the endpoint %s was refused, because %s (%s); further ones are counted, and not logged",
            caller or "an unknown process",
            endpoint,
            _REASONS[refusal],
            _ADVICE[refusal],
        )
