"""A routing table of the user's own: its file travels in a ConfigMap, and the policy reads it there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ampd.errors import UserError
from ampd.policies.naming import parse_named

CONFIG_MAP = "ampd-routing-table"
FOLDER = "/etc/ampd/routing"
_KEY = "table.json"


def table_of(routing: str) -> str | None:
    """The text of the table that a routing policy reads from a file of this machine; None: it reads none.

    Raises:
        UserError: the file cannot be read.
    """
    path = _path(*parse_named(routing))
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot read the routing table ({error.strerror})") from None


def routing_in_container(routing: str) -> str:
    """The policy as the coordinator is to be told: with the path of the table inside the container."""
    name, parameters = parse_named(routing)
    if _path(name, parameters) is None:
        return routing
    written = ", ".join(f"{key}={_word(value)}" for key, value in {**parameters, "table": f"{FOLDER}/{_KEY}"}.items())
    return f"{name}({written})"


def mounted(pod: dict[str, Any]) -> None:
    """Give a coordinator's pod template the ConfigMap."""
    pod["spec"]["volumes"].append({"name": "routing-table", "configMap": {"name": CONFIG_MAP}})
    pod["spec"]["containers"][0]["volumeMounts"].append(
        {"name": "routing-table", "mountPath": FOLDER, "readOnly": True}
    )


def data_of(table: str) -> dict[str, str]:
    """The ConfigMap's data."""
    return {_KEY: table}


def _path(name: str, parameters: dict[str, Any]) -> Path | None:
    table = parameters.get("table", "default")
    return Path(str(table)) if name == "table" and table != "default" else None


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
