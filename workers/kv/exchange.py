"""The protocol of a KV exchange, which hides the transport (NIXL, modelled, in-process) from the worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ampd.wire import KvReply, KvRequest
from workers.kv.store.figures import StoreFigures


@dataclass(frozen=True, slots=True)
class KvFetch:
    """The result of one fetch.

    Attributes:
        tokens: tokens whose KV was read from the peer (full pages); 0 if nothing was missing or nothing was held there.
        bytes, seconds: of the transfer itself, directory look-up included.
        error: why it ended early; None: it did not. The missing part is recomputed.
    """

    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    error: str | None = None


class KvPeers(Protocol):
    """How a worker calls the KV endpoint of another worker."""

    async def call(self, worker_id: str, request: KvRequest, timeout_s: float) -> KvReply:
        """Call a worker. After a `TimeoutError` or `ConnectionError` the worker recomputes the KV."""
        ...


HeldListener = Callable[[str, int], None]
"""Called with (session_id, held tokens) whenever that number changes; 0: released."""


class KvExchange(Protocol):
    """Moves the KV of sessions between workers. A transfer that fails raises nothing; its result has the error."""

    async def serve(self, request: KvRequest) -> KvReply:
        """Answer a peer's (or a coordinator's) call: lease, unlease, match, release_session."""
        ...

    def protect(self, rid: str, keys: Sequence[bytes]) -> int:
        """Protect what is stored of a context for request `rid`, until `unprotect`; returns its tokens."""
        ...

    async def fetch(
        self,
        rid: str,
        keys: Sequence[bytes],
        held_tokens: int,
        source_worker_id: str,
        timeout_s: float,
        expected_tokens: int | None = None,
    ) -> KvFetch:
        """Read the pages that are missing here from a peer, and protect them for request `rid`.

        Args:
            keys: of the pages that the engine can use: all of the prompt but the page of its last token.
            held_tokens: what `protect` returned for them.
            expected_tokens: what the peer is expected to have of them; None: all. It waits for its engine only if it
                has less.
        """
        ...

    async def unprotect(self, rid: str) -> None:
        """End the protection for a request that will not (or no longer) use it."""
        ...

    async def held_tokens(self, session_id: str, *, waits: bool = True) -> int:
        """How much of a session's latest context is held here, in tokens.

        Args:
            waits: for what the engine has computed and not stored yet. Otherwise this may be too little.
        """
        ...

    async def release_session(self, session_id: str) -> int:
        """Forget a session; returns the tokens that it held."""
        ...

    @property
    def session_tokens(self) -> int:
        """Tokens of the stored pages that sessions use, shared ones once; cheap, no I/O."""
        ...

    @property
    def shared_prefixes(self) -> Mapping[str, int]:
        """Key -> tokens of the stored prefixes that several sessions have used; see `ampd.serving.shared_prefixes`."""
        ...

    @property
    def figures(self) -> StoreFigures:
        """Size and use of the store; cheap, no I/O."""
        ...

    @property
    def activity(self) -> int:
        """Grows whenever KV was computed or read. An engine that computes a long prefill shows it here."""
        ...

    def connect(self, peers: KvPeers, on_held: HeldListener) -> None:
        """Give the exchange its way to other workers and its listener, before the first fetch."""
        ...
