"""The answers of a coordinator's system port about sessions, checked: anything may listen at the URL of a user."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ampd.documents import first_problem
from ampd.errors import UserError

_Tokens = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Key = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class _Answer(BaseModel):
    """A coordinator of a later version may add fields."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class SessionRow(_Answer):
    """One session; None: only the coordinator that served its last round knows it."""

    session_key: _Key
    session_id: str | None
    tenant: str | None
    idle_s: _Seconds | None
    held_tokens: dict[str, _Tokens]


class SessionList(_Answer):
    """The answer of `list`."""

    sessions: list[SessionRow]
    total: _Tokens


class SessionBinding(_Answer):
    """The decode worker of a session."""

    worker_id: str
    epoch: int


class ShownSession(SessionRow):
    """The answer of `show`."""

    binding: SessionBinding | None


class EndedSession(_Answer):
    """The answer of `end`."""

    session_key: _Key
    was_bound: bool
    released_tokens: _Tokens


Kind = TypeVar("Kind", bound=_Answer)


def read_answer(kind: type[Kind], answer: Any, place: str) -> Kind:
    """Check an answer from `place`.

    Raises:
        UserError: it is none of a coordinator.
    """
    try:
        return kind.model_validate(answer)
    except ValidationError as error:
        raise UserError(
            f"{place} does not answer as a coordinator ({first_problem(error)}); see --coordinator-url"
        ) from None
