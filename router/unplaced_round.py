"""A round before its placement, and how much of its prompt is known already: from its session, or from others."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from operator import itemgetter

from ampd.keys import TOKEN_BYTES, page_keys
from ampd.serving.shared_prefixes import prefix_key, published, shared_tokens
from ampd.state.store import Binding
from ampd.types import WorkerView
from router.decision_record import DecisionRecord
from router.request import RoundRequest
from router.round_errors import WorkerLostError, WorkerRefusedError
from router.session_branches import LEAST_TOKENS, Found
from router.session_memory import Session
from router.worker_access import WorkerAccess
from router.worker_deaths import RequestDeaths

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
            prompt: packed tokens, see `ampd.keys.pack_tokens`.
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


log = logging.getLogger(__name__)


class PromptHistory:
    """Compares one round's prompt with what is known of its session.

    It notes in `record` whether the prompt was rewritten, and how much of the session's context it has kept.
    """

    def __init__(
        self,
        request: RoundRequest,
        record: DecisionRecord,
        session: Session,
        access: WorkerAccess,
        page_size_tokens: int,
        prefixes: KnownPrefixes,
        found: Found,
    ) -> None:
        self._request = request
        self._record = record
        self._access = access
        self._page_size_tokens = page_size_tokens
        self._prefixes = prefixes
        self._keys: list[bytes] = []
        self._overlap = session.overlap(request.prompt)
        record.rewritten = self._overlap.is_rewritten
        record.kept_tokens = self._overlap.kept_tokens
        self._fork = found.fork
        self._forked: dict[str, int] = {}
        if found.fork is not None:
            record.rewritten = found.breaks_at_tokens is not None
            record.kept_tokens = found.fork.tokens
        record.breaks_at_tokens = found.breaks_at_tokens

    async def find_fork(self) -> None:
        """Ask the worker of the context that a new branch begins with how much of it is there."""
        fork, self._fork = self._fork, None
        if fork is None or fork.worker_id is None or fork.tokens < LEAST_TOKENS:
            return
        try:
            pages = await self._access.matched_pages(fork.worker_id, self._first_keys(self._request.prompt_tokens))
        except (WorkerLostError, WorkerRefusedError) as error:
            log.info("%s; a branch begins without the context before", error)
        else:
            self._forked = {fork.worker_id: pages * self._page_size_tokens}

    def shared(self, workers: Sequence[WorkerView]) -> Mapping[str, int]:
        """Tokens of the prompt's beginning that workers hold for other sessions, by worker id."""
        if not (there := published(workers)):
            return self._forked
        request = self._request
        prefixes = self._prefixes.of(request.prompt, request.tenant, there, self._page_size_tokens, self._first_keys)
        shared = shared_tokens(prefixes, workers)
        for worker_id, tokens in self._forked.items():
            shared[worker_id] = max(tokens, shared.get(worker_id, 0))
        return shared

    async def held_by(self, decode: WorkerView) -> int:
        """Tokens of the session whose KV the decode worker has: what it publishes, as far as the prompt still fits."""
        held = decode.held_tokens.get(self._request.session_id, 0)
        overlap = self._overlap
        if overlap.common_tokens >= held or overlap.is_rewritten:
            return min(overlap.common_tokens, held)
        # The worker holds more than this replica knows of: another replica served the session.
        keys = self._first_keys(len(self._request.token_ids))
        try:
            pages = await self._access.matched_pages(decode.worker_id, keys)
        except (WorkerLostError, WorkerRefusedError) as error:
            log.warning("%s; counting on the %d tokens known here", error, overlap.common_tokens)
            return overlap.common_tokens
        matched = pages * self._page_size_tokens
        self._record.kept_tokens = max(self._record.kept_tokens, matched)
        self._record.rewritten = matched < min(held, len(keys) * self._page_size_tokens)
        return min(matched, held)

    def _first_keys(self, tokens: int) -> list[bytes]:
        """Keys of the full pages of the prompt's first `tokens`, or of more. Each page is hashed once."""
        token_ids = self._request.token_ids[:tokens]
        if len(token_ids) // self._page_size_tokens > len(self._keys):
            self._keys = page_keys(token_ids, self._page_size_tokens, self._keys, tenant=self._request.tenant)
        return self._keys


@dataclass(eq=False)
class UnplacedRound:
    """A round as its placement sees it (`router.round_run.RoundRun`).

    Attributes:
        session: what this replica knows of its session; it may be out of date.
        request_id: of the client's request.
        arrival_s: as in its task (`PrefillTask`).
        binding: the binding that this replica knows.
        holder: the owner before, which may have history that the owner lacks.
        may_move: the session may move with this round.
        is_admitted: the round was admitted before.
        goes_on: its session has had rounds before, maybe in another branch.
        local_only: why the prefill must be local, if it must.
        avoided: workers that failed this round already, or refused it.
    """

    request: RoundRequest
    session: Session
    history: PromptHistory
    request_id: str
    deaths: RequestDeaths
    arrival_s: float
    binding: Binding | None = None
    holder: str | None = None
    may_move: bool = False
    is_admitted: bool = False
    goes_on: bool = False
    local_only: str | None = None
    avoided: set[str] = field(default_factory=set)

    @property
    def session_id(self) -> str:
        return self.request.session_id
