"""Settings that all processes of a graph share."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from ampd.settings import Settings
from ampd.types import WINDOW_S, Slo


class GraphSettings(Settings):
    """Settings that coordinators and workers of a graph must agree on."""

    namespace: str = Field(
        "ampd",
        validation_alias="dyn_namespace",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        description="Dynamo namespace of the graph; also the prefix of its keys in Redis.",
    )
    state_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="Shared state: redis://, rediss:// (TLS) or unix:// of a Redis >= 6.2, or redis+sentinel://; "
        "credentials in it.",
    )
    graph_secret_file: Path | None = Field(
        None,
        description="File with secrets that coordinators and workers share, one per line: the first signs "
        "their calls, all are accepted. Default: calls are not signed, and the processes start "
        "on loopback only.",
    )
    ttft: float = Field(2.0, gt=0, description="TTFT target in seconds, for rounds that bring none of their own.")
    itl: float = Field(0.1, gt=0, description="ITL target in seconds, for rounds that bring none of their own.")
    max_wait: float = Field(
        4.0,
        ge=0,
        description="Longest predicted wait of a round, in TTFT targets, before it gets 429; a quarter for "
        "a session's first round. A round that has waited twice as long is given up. 0: no "
        "bounds.",
    )
    perf: str | None = Field(
        None,
        description="Performance model: a shipped profile's name, a profile file, or MODEL@GPU, as in "
        "qwen3-32b@h20 or /models/Qwen3-8B@h200. `ampd serve` derives it from the model folder "
        "and this machine's GPUs by default.",
    )
    session_ttl_s: float = Field(1800.0, gt=0, description="Seconds without a round after which a session is released.")
    session_first_ttl_s: float = Field(
        300.0, gt=0, description="The same until a session's second round, if it is less than --session-ttl-s."
    )
    lease_s: float = Field(
        5.0, gt=0, description="Seconds for which a worker counts as alive after its last heartbeat."
    )
    log_rounds: Literal["none", "end", "steps"] = Field(
        "end",
        description="Lines of a round at INFO: none, one of the coordinator at its end, or every step in "
        "every process. Errors are always logged.",
    )
    window_s: float = Field(WINDOW_S, gt=0, description="Length in seconds of the sliding windows of TTFT and ITL.")

    @property
    def slo(self) -> Slo:
        """The targets of rounds that bring none of their own."""
        return Slo(ttft_s=self.ttft, itl_s=self.itl)
