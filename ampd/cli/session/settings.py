"""Settings of `ampd session`."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import CliPositionalArg

from ampd.settings import Settings


class ControlSettings(Settings):
    """The coordinator that is asked."""

    url: str | None = Field(
        None,
        description="System port of a coordinator, as in http://HOST:PORT; default: DYN_SYSTEM_PORT of this process "
        "(in a coordinator's container), else that of the `ampd serve` on this machine.",
    )
    as_json: bool = Field(False, validation_alias="json", description="Print the coordinator's answer as JSON.")


class ListSettings(ControlSettings):
    """List the sessions whose KV a worker holds, the largest first."""

    limit: int = Field(50, ge=1, description="Sessions to list.")


class NamedSettings(ControlSettings):
    """The session that is meant."""

    session_id: CliPositionalArg[str] = Field(
        description="The client's id of the session, or its name of 32 hexadecimal digits from `ampd session list`."
    )
    tenant: str = Field("", description="Tenant of the session (x-tenant-id), if it has one.")


class ShowSettings(NamedSettings):
    """Show one session: its decode worker, and where its KV is."""


class EndSettings(NamedSettings):
    """End a session: its binding and its KV are released everywhere, without a round."""
