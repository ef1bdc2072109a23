"""Keys of the pages of each session's last prompt here, so that the next prompt is hashed only from its end on."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import sha256

from ampd.keys import TOKEN_BYTES, page_keys

MOST_PAGES = 1 << 19
"""Of all sessions together: 8 million tokens with pages of 16. Their keys take at most 40 MB, and less where the
directory of the store has the same keys."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A prompt that was hashed.

    Attributes:
        digest: of its full pages' tokens, all at once, which takes a tenth of the time of hashing them page by page.
    """

    tenant: str
    digest: bytes
    keys: list[bytes]


class ContextKeys:
    """Names the pages of prompts (`ampd.keys`). Each page of a session is hashed here once, not in each round.

    A prompt takes over the keys of its session's last one only if it begins with the same tokens. This is checked by
    their digest, as the names of pages are, and neither another process nor the session's name is believed.

    Args:
        most_pages: whose keys are kept, of the sessions that were used last.
    """

    def __init__(self, most_pages: int = MOST_PAGES) -> None:
        self._most_pages = most_pages
        self._pages = 0
        self._known: dict[str, _Known] = {}

    def of(self, session_id: str, packed: array[int], page_tokens: int, *, tenant: str) -> list[bytes]:
        """One key per full page of a session's prompt.

        Args:
            packed: the prompt as native 32-bit words.
            page_tokens: tokens per page, the same in all calls.
        """
        words = memoryview(packed).cast("B")[: len(packed) // page_tokens * page_tokens * TOKEN_BYTES]
        before = self._taken(session_id)
        known_bytes = len(before.keys) * page_tokens * TOKEN_BYTES if before else 0
        digest = sha256(words[:known_bytes])
        is_longer = before is not None and before.tenant == tenant and known_bytes <= len(words)
        known = before.keys if before and is_longer and digest.digest() == before.digest else ()
        keys = page_keys(packed, page_tokens, known, tenant=tenant)
        digest.update(words[known_bytes:])
        self._keep(session_id, _Known(tenant, digest.digest(), keys))
        return keys

    def forget(self, session_id: str) -> None:
        """Forget a session, which has ended or moved away."""
        self._taken(session_id)

    def _taken(self, session_id: str) -> _Known | None:
        known = self._known.pop(session_id, None)
        self._pages -= len(known.keys) if known else 0
        return known

    def _keep(self, session_id: str, known: _Known) -> None:
        self._known[session_id] = known
        self._pages += len(known.keys)
        while self._pages > self._most_pages:
            self.forget(next(iter(self._known)))
