"""Which published prefixes a prompt begins with, without hashing every page of every prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from operator import itemgetter

from ampd.keys import TOKEN_BYTES
from ampd.serving.shared_prefixes import prefix_key

_MOST_KNOWN = 4096


class KnownPrefixes:
    """The tokens of published prefixes that prompts began with, as digests, least recently used out first.

    A prefix is published by the key of its last page, which is a chain of hashes over all its pages. When a prompt is
    found to begin with it, the digest of the whole prefix is kept. Later prompts are compared by that digest, which
    takes a tenth of the time, and which also proves that a prompt does not begin with it.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[str, bytes] = OrderedDict()

    def of(
        self,
        prompt: bytes,
        tenant: str,
        published: Mapping[str, int],
        page_tokens: int,
        page_keys: Callable[[int], Sequence[bytes]],
    ) -> dict[str, int]:
        """The published prefixes that a prompt begins with, key -> tokens.

        Args:
            prompt: packed tokens, see `router.session_memory.pack_tokens`.
            page_keys: (tokens) -> keys of the full pages of the prompt's first tokens. Called for prefixes that no
                prompt was compared with successfully yet.
        """
        found: dict[str, int] = {}
        unknown: list[tuple[str, int, bytes]] = []
        running, at, digest = sha256(tenant.encode("utf-8", "surrogatepass") + b"\0"), 0, b""
        tokens_of = memoryview(prompt)
        for key, tokens in sorted(published.items(), key=itemgetter(1)):
            if tokens * TOKEN_BYTES > len(prompt):
                break
            if tokens > at:
                running.update(tokens_of[at * TOKEN_BYTES : tokens * TOKEN_BYTES])
                at, digest = tokens, running.digest()
            known = self._digests.get(key)
            if known is None:
                unknown.append((key, tokens, digest))
            elif known == digest:
                found[key] = tokens
                self._digests.move_to_end(key)
        for key, tokens, digest in unknown:
            pages = page_keys(unknown[-1][1])
            if tokens >= page_tokens and prefix_key(pages[tokens // page_tokens - 1]) == key:
                found[key] = tokens
                self._know(key, digest)
        return found

    def _know(self, key: str, digest: bytes) -> None:
        self._digests[key] = digest
        if len(self._digests) > _MOST_KNOWN:
            self._digests.popitem(last=False)
