"""Dynamo's system port of a coordinator or worker (`DYN_SYSTEM_PORT`): /metrics, /health and /live.

Dynamo gives the same answer at /health and /live. In our processes it means: this process has started and can work. The
answer must not depend on other processes, because a failing liveness probe ends the process. For example, a coordinator
without a decode worker is ready. It stays out of discovery until a decode worker appears (metric `ampd_live_workers`).

Dynamo's own threads answer there, also when the event loop of our code is blocked for good. So liveness probes ask
`LIVENESS_PATH`, which the event loop answers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from ampd.child_process import HIGHEST_PORT
from ampd.errors import UserError

PORT_VARIABLE = "DYN_SYSTEM_PORT"
HOST_VARIABLE = "DYN_SYSTEM_HOST"
OFF = -1

_LIVENESS_ROUTE = "live"
LIVENESS_PATH = f"/engine/{_LIVENESS_ROUTE}"
"""The path of the system port that the event loop answers with 200, also before the process is ready."""

_BY_ENDPOINTS_VARIABLE = "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS"

log = logging.getLogger(__name__)


def prepare(prog: str, environment: MutableMapping[str, str] | None = None) -> None:
    """Check the port, and keep Dynamo from deriving /health from its endpoints. Call it before Dynamo's runtime starts.

    A /health that follows the endpoints never turns bad again. It would also count a coordinator as dead that waits for
    its first decode worker, which may load for many minutes.

    Raises:
        UserError: Dynamo cannot open this port.
    """
    env = os.environ if environment is None else environment
    port = env.get(PORT_VARIABLE, str(OFF))
    try:
        fits = OFF <= int(port) <= HIGHEST_PORT
    except ValueError:
        fits = False
    if not fits:
        raise UserError(
            f"{prog}: {PORT_VARIABLE}={port}: not a port that Dynamo takes for metrics and health; use 1 to "
            f"{HIGHEST_PORT}, 0 (any free one) or {OFF} (none)"
        )
    env.pop(_BY_ENDPOINTS_VARIABLE, None)


def set_ready(runtime: Any, is_ready: bool) -> None:
    """Set the answer of /health and /live: this process can work, or it cannot (any more)."""
    runtime.set_health_status(is_ready)


def answer_liveness(runtime: Any) -> None:
    """Let the running event loop answer at `LIVENESS_PATH`."""
    runtime.register_engine_route(_LIVENESS_ROUTE, _alive)


async def _alive(_request: Mapping[str, Any]) -> dict[str, Any]:
    return {"status": "alive"}


def log_address(runtime: Any) -> None:
    """Log the address of the metrics, or that the port could not be opened."""
    port = os.environ.get(PORT_VARIABLE, str(OFF))
    if url := runtime.system_status_server_url():
        log.info("metrics at %s/metrics", url)
    elif int(port) >= 0:
        log.error("no metrics and no health checks: port %s is taken; set %s to a free one", port, PORT_VARIABLE)
