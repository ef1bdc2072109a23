"""Settings of `ampd session`."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import CliPositionalArg

from ampd.settings import Settings

_URL = (
    "System port of a coordinator, as in http://HOST:PORT; default: DYN_SYSTEM_PORT of this process, else "
    "those of the `ampd serve` on this machine."
)
_JSON = "Print the coordinator's answer as JSON."


class ListSettings(Settings):
    """List the sessions whose KV a worker holds, the largest first."""

    limit: int = Field(50, ge=1, description="Sessions to list.")
    coordinator_url: str | None = Field(None, description=_URL)
    as_json: bool = Field(False, validation_alias="json", description=_JSON)


class ShowSettings(Settings):
    """Show one session: its decode worker, and where its KV is."""

    session_id: CliPositionalArg[str] = Field(
        description="The client's id of the session. If no client uses it: its name of 32 hexadecimal digits from "
        "`ampd session list`."
    )
    tenant: str = Field("", description="Tenant of the session (x-tenant-id), if it has one.")
    coordinator_url: str | None = Field(None, description=_URL)
    as_json: bool = Field(False, validation_alias="json", description=_JSON)


class EndSettings(ShowSettings):
    """End a session: its binding and its KV are released everywhere, without a round."""

    tenant: str = Field(
        "",
        description="Tenant of the session (x-tenant-id), if it has one, also with a name of 32 digits.",
    )
