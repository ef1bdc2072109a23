"""A graph's frontend: its command line and its environment, wherever one is started on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ampd.cli.serve.body_limit import VARIABLE as BODY_LIMIT_MB
from ampd.cli.serve.processes import ProcessSpec, python_module
from ampd.settings import PREFIX

FRONTEND_ENVIRONMENT = {
    "DYN_DISABLE_FRONTEND_ADMIN_API": "1",
    # Before a firewall or a NAT table forgets them: Dynamo finds out only when a request meets a broken connection.
    "DYN_TCP_HOST_IDLE_TTL_SECS": "60",
    # It would write SGLang's logging configuration, which only workers need, to a temporary file that stays.
    "DYN_SKIP_SGLANG_LOG_FORMATTING": "1",
    # A stream's status waits so long for the first token or an error, so that a refusal has its own status.
    "DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS": "5000",
    # Empty lines in a stream without a token, so that nothing on the way takes a long prefill for a dead connection.
    "DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS": "10000",
}
"""Of every frontend, also of those in `k8s/base/graph.yaml`."""


@dataclass(frozen=True, slots=True)
class Frontend:
    """What a frontend must know.

    Attributes:
        host, port: where clients find it.
        namespace: of the graph.
        session_ttl_s: for how long a session stays at one of several coordinators; None: there is only one.
        body_limit_mb: largest body of a request that it takes; None: as large as Dynamo allows.
        status_relay: whether the relay stands before it, as it should.
    """

    host: str
    port: int
    namespace: str
    session_ttl_s: float | None = None
    body_limit_mb: int | None = None
    status_relay: bool = True

    def process(self, name: str, environment: Mapping[str, str]) -> ProcessSpec:
        """The process to start. It inherits none of our variables, because some are secret.

        Args:
            environment: what all processes of the graph get.
        """
        limit = {} if self.body_limit_mb is None else {BODY_LIMIT_MB: str(self.body_limit_mb)}
        # For so long Dynamo avoids a coordinator with a broken connection. Nobody can stand in for the only one.
        avoids = {"DYN_RUNTIME_INHIBITED_DURATION_SECS": "0" if self.session_ttl_s is None else "1"}
        variables = {**FRONTEND_ENVIRONMENT, **avoids, **limit, **environment}
        return ProcessSpec(name, self._argv(), variables, hides=PREFIX)

    def _argv(self) -> tuple[str, ...]:
        flags = ["--http-host", self.host, "--http-port", str(self.port), "--router-mode", "round-robin"]
        # A round that meets a reset connection goes on at a new one, and a round whose coordinator dies at another one:
        # only once, so that no request ends all coordinators.
        flags += ["--namespace", self.namespace, "--migration-limit", "1"]
        if self.session_ttl_s is not None:
            # A replica remembers its sessions' contexts. Any replica can serve any round; affinity saves a KV query.
            # Soft: the sessions of a dead coordinator go on at another one.
            flags += ["--router-session-affinity-ttl-secs", str(int(self.session_ttl_s))]
            flags += ["--router-session-affinity-mode", "soft"]
        return python_module("router.status_relay" if self.status_relay else "dynamo.frontend", flags)
