"""Dynamo's system port of one of our processes (`DYN_SYSTEM_PORT`): /metrics, and /health and /live that say the truth.

Dynamo answers /health and /live with the same word. For our processes it means: this process has started and can work.
It must not depend on other processes, because a liveness probe that fails ends a process that is well: a coordinator
without a decode worker is ready, and out of discovery until there is one (`ampd_live_workers` tells).
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

from ampd.errors import UserError

PORT_VARIABLE = "DYN_SYSTEM_PORT"
HOST_VARIABLE = "DYN_SYSTEM_HOST"
OFF = -1
HIGHEST_PORT = 32767
"""Dynamo reads the port as a signed 16-bit number."""

_BY_ENDPOINTS_VARIABLE = "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS"

_LOG = logging.getLogger(__name__)


def prepare(prog: str, environment: MutableMapping[str, str] | None = None) -> None:
    """Check the environment, and take the word on the health from Dynamo; before its runtime starts.

    Left to Dynamo, /health follows the named endpoints: it never turns bad again, and a coordinator that waits for the
    first decode worker, which may load for many minutes, would count as dead.

    Raises:
        UserError: the port is none that Dynamo can open.
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


def say_ready(runtime: Any, is_ready: bool) -> None:
    """Let /health and /live say that this process works, or that it does not (any more)."""
    runtime.set_health_status(is_ready)


def say_where(runtime: Any) -> None:
    """Log where the metrics are, or that there are none because the port could not be opened."""
    port = os.environ.get(PORT_VARIABLE, str(OFF))
    if url := runtime.system_status_server_url():
        _LOG.info("metrics at %s/metrics", url)
    elif int(port) >= 0:
        _LOG.error("no metrics and no health checks: port %s is taken; set %s to a free one", port, PORT_VARIABLE)
