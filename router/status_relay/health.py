"""The frontend's health, as anybody may see it.

Dynamo's frontend lists the id and the address of each process of the graph. Those stay inside.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from ampd.wire import COORDINATOR_COMPONENT

HEALTH_PATH = "/health"
"""The frontend's, if none is set."""


def public_health(body: bytes) -> dict[str, Any]:
    """The status, and an instance without an id for each coordinator: `ampd serve` waits for them.

    Args:
        body: the frontend's answer.
    """
    with suppress(ValueError, RecursionError):
        match json.loads(body):
            case {"status": str(status), "instances": list(instances)}:
                coordinator = {"component": COORDINATOR_COMPONENT}
                return {"status": status, "instances": [coordinator for each in instances if _is_coordinator(each)]}
            case {"status": str(status)}:
                return {"status": status}
    return {}


def _is_coordinator(instance: Any) -> bool:
    return isinstance(instance, dict) and instance.get("component") == COORDINATOR_COMPONENT
