"""How the status relay marks its requests, so that coordinators know what it wants to know (`RELAY_HEADER`)."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

_ROUND, _QUESTION, _QUESTION_FOR_TEXT = "round", "question", "question-for-text"

_MOST_CHARS = 64
"""Of a name, because coordinators keep them, and a client without the relay may send any."""


@dataclass(frozen=True, slots=True)
class RelayMark:
    """The mark of a request of the relay, which alone wants refusals in streams.

    Attributes:
        request: a secret name of the client's request. A question has the name of the request that it is about.
        is_question: it asks only why that request was refused. No coordinator serves it.
        as_text: the refusal comes as text that begins with the mark, else as a comment.
    """

    request: str
    is_question: bool = False
    as_text: bool = False

    @classmethod
    def fresh(cls) -> RelayMark:
        """The mark of a client's request."""
        return cls(secrets.token_hex(16))

    def question(self, *, as_text: bool = False) -> RelayMark:
        """The mark of a question about this request."""
        return RelayMark(self.request, True, as_text)

    def __str__(self) -> str:
        kind = (_QUESTION_FOR_TEXT if self.as_text else _QUESTION) if self.is_question else _ROUND
        return f"{kind}:{self.request}"


def relay_mark(value: str | None) -> RelayMark | None:
    """The mark that a header's value is; None: it is none, so that the request did not come from the relay."""
    kind, _, request = (value or "").partition(":")
    if not 0 < len(request) <= _MOST_CHARS or kind not in (_ROUND, _QUESTION, _QUESTION_FOR_TEXT):
        return None
    return RelayMark(request, kind != _ROUND, kind == _QUESTION_FOR_TEXT)
