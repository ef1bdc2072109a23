"""The context that a round goes on from: a branch of its session, or a session that no client has named.

An agent may run several contexts under one name: forks, sub-agents, and the new context after a compaction. Each of
these branches is a session of its own for all parts of the graph, with a binding, KV and a time to live. Only the
branches of one name end together. The branch of a round is the one whose context its prompt continues.

A round without a name ends with its answer. If a later prompt of the same tenant continues it, both belong to a
session that gets a name here.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from uuid import uuid4

from ampd.keys import PAGE_TOKENS, TOKEN_BYTES, branch_key, session_key
from ampd.telemetry.windows import LENGTH_S
from ampd.types import BreakingSession
from router.request import RoundRequest
from router.session_memory import UNKNOWN, Overlap, Session, SessionMemory

log = logging.getLogger(__name__)

LEAST_TOKENS = 4 * PAGE_TOKENS
"""Of a context that is worth to be found again."""

_REWRITES = 6
"""Rounds in a row that continue nothing, from which on a session is taken to rewrite its context in each round, and
gets no further branches. Otherwise each round would leave KV that nobody needs."""

_BREAKS = 3
"""The same, from which on operators see the session."""

_MOST_YOUNG = 64
"""Branches of a session that have had one round."""
_MOST_COMPARED = 32
"""Branches of a session that a prompt is compared with, those used last."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Another context that a new branch begins with.

    Attributes:
        worker_id: the worker that has its KV; None: it is not known.
        tokens: of the prompt, that are in that context.
    """

    worker_id: str | None
    tokens: int


@dataclass(slots=True, eq=False)
class Found:
    """The branch of a round.

    Attributes:
        request: the round as one of this branch.
        fork: where the branch comes from, if this is its first round.
        goes_on: an earlier round would lose its work if this one were refused.
        is_unnamed: no client has named the session.
        breaks_at_tokens: where the prompt departs from the nearest context of its session; None: it continues one.
    """

    request: RoundRequest
    fork: Fork | None = None
    goes_on: bool = False
    is_unnamed: bool = False
    breaks_at_tokens: int | None = None


@dataclass(slots=True)
class _Tree:
    """The branches of one name.

    Attributes:
        branches: keys of those that are remembered or have a round in progress, the last used one last.
        running: rounds in progress.
        young: branches that have had one round.
        breaking: what operators see, while `breaks` rounds in a row have continued none of the contexts.
        broke_s: when the last one began.
    """

    client_id: str
    branches: OrderedDict[str, None] = field(default_factory=OrderedDict)
    running: list[Found] = field(default_factory=list)
    young: OrderedDict[str, None] = field(default_factory=OrderedDict)
    breaks: int = 0
    breaking: BreakingSession | None = None
    broke_s: float = 0.0


class SessionBranches:
    """Finds the branch of each round that begins here.

    Args:
        first_ttl_s: for how long an unnamed round can be continued.
    """

    def __init__(
        self, sessions: SessionMemory, first_ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sessions = sessions
        self._clock = clock
        self._trees: dict[str, _Tree] = {}
        self._root_of: dict[str, str] = {}
        self._breaking: dict[str, _Tree] = {}
        self._unnamed = _UnnamedRounds(first_ttl_s, clock)
        sessions.on_forget = self._forgotten

    def begin(self, request: RoundRequest) -> Found:
        """The branch of a round. `end` must follow."""
        if request.client_session_id is None:
            return self._unnamed_round(request)
        root = request.session_id
        tree = self._trees.get(root)
        if tree is None:
            tree = self._trees[root] = _Tree(request.client_session_id)
        found = self._branch(tree, request)
        self._trees[root] = tree  # all its branches may have expired just now
        key = found.request.session_id
        tree.branches[key] = None
        tree.branches.move_to_end(key)
        tree.running.append(found)
        self._root_of[key] = root
        return found

    def end(self, found: Found, worker_id: str | None) -> None:
        """A round is over, and its session is remembered, or not.

        Args:
            worker_id: the decode worker that has served it; None: none has.
        """
        request = found.request
        if found.is_unnamed and worker_id is not None:
            self._unnamed.add(request, worker_id)
        tree = self._trees.get(self._root_of.get(request.session_id, ""))
        if tree is not None and found in tree.running:
            tree.running.remove(found)
            if self._sessions.find(request.session_id) is UNKNOWN:
                self._forgotten(request.session_id)

    def of(self, session_id: str) -> list[str]:
        """A session with all branches that belong to it, itself first."""
        tree = self._trees.get(self._root_of.get(session_id, session_id))
        return [session_id, *(key for key in tree.branches if key != session_id)] if tree else [session_id]

    def forget(self, session_id: str) -> None:
        """A session has ended, with all its branches."""
        for key in self.of(session_id):
            self._sessions.forget(key)

    def breaking(self) -> list[BreakingSession]:
        """The sessions whose prefix has broken in every round of late, those that lose the most first."""
        least_s = self._clock() - LENGTH_S
        self._breaking = {root: tree for root, tree in self._breaking.items() if tree.broke_s >= least_s}
        found = [tree.breaking for tree in self._breaking.values() if tree.breaking is not None]
        return sorted(found, key=lambda each: each.at_tokens - each.of_tokens)

    # -- named sessions

    def _branch(self, tree: _Tree, request: RoundRequest) -> Found:
        compared = [(key, session, session.overlap(request.prompt)) for key, session in self._contexts(tree)]
        if not compared:
            tree.young[request.session_id] = None
            return Found(request)
        following = [each for each in compared if _follows(request, *each[1:])]
        key, session, overlap = max(following or compared, key=lambda each: each[2].common_tokens)
        if following or request.is_announcement or request.has_output:
            tree.breaks = 0
            self._breaking.pop(request.session_id, None)
            tree.young.pop(key, None)
            return Found(replace(request, session_id=key), goes_on=True)
        at_tokens = overlap.common_tokens
        self._note_break(tree, request.session_id, overlap)
        if tree.breaks > _REWRITES or len(tree.young) >= _MOST_YOUNG:
            named = replace(request, session_id=self._given_up(tree, key, overlap))
            return Found(named, goes_on=True, breaks_at_tokens=at_tokens)
        new = request.session_id
        if new in tree.branches:
            new = branch_key(new)
        tree.young[new] = None
        fork = Fork(session.binding.worker_id if session.binding else None, at_tokens)
        return Found(replace(request, session_id=new), fork, goes_on=True, breaks_at_tokens=at_tokens)

    def _note_break(self, tree: _Tree, root: str, overlap: Overlap) -> None:
        """Sub-agents that begin at the same time are no sign of a prefix that breaks."""
        tree.breaks = 1 if tree.running else tree.breaks + 1
        if tree.breaks < _BREAKS:
            return
        tree.breaking = BreakingSession(root, tree.breaks, overlap.common_tokens, overlap.known_tokens)
        tree.broke_s = self._clock()
        self._breaking[root] = tree
        if tree.breaks == _BREAKS:
            log.warning(
                "session %r: the prompts of %d rounds in a row depart from those before, now at token %d of %d; what "
                "follows is prefilled again in each round (docs/clients.md#prefixes-that-break)",
                tree.client_id,
                tree.breaks,
                overlap.common_tokens,
                overlap.known_tokens,
            )

    def _contexts(self, tree: _Tree) -> Iterator[tuple[str, Session]]:
        """What a prompt of a session may continue. The context of a round in progress is its prompt so far."""
        running = {found.request.session_id: found.request for found in tree.running}
        for key in list(reversed(tree.branches))[:_MOST_COMPARED]:
            session = self._sessions.find(key)
            if (request := running.get(key)) is not None:
                prompt_tokens = request.prompt_tokens
                yield key, replace(session, context=request.prompt, prompt_tokens=prompt_tokens, computed_tokens=0)
            elif session is not UNKNOWN:
                yield key, session

    def _given_up(self, tree: _Tree, nearest: str, overlap: Overlap) -> str:
        """The branch whose context a round replaces: one that it shares much with, or the oldest one."""
        running = {found.request.session_id for found in tree.running}
        if 2 * overlap.common_tokens >= overlap.known_tokens:
            return nearest
        return next((key for key in tree.young if key not in running), nearest)

    def _forgotten(self, session_id: str) -> None:
        """The memory has forgotten a branch, or has never known it."""
        root = self._root_of.get(session_id, "")
        tree = self._trees.get(root)
        if tree is None or any(found.request.session_id == session_id for found in tree.running):
            return
        self._root_of.pop(session_id, None)
        tree.branches.pop(session_id, None)
        tree.young.pop(session_id, None)
        if not tree.branches:
            del self._trees[root]

    # -- sessions that no client has named

    def _unnamed_round(self, request: RoundRequest) -> Found:
        known = None if request.has_output else self._unnamed.take(request)
        if known is None:
            return Found(request, is_unnamed=True)
        session = self._sessions.find(session_key(request.tenant, known.name)) if known.name else UNKNOWN
        if session is UNKNOWN:
            known = replace(known, name=f"unnamed-{uuid4().hex[:12]}")
        named = replace(request, session_id=session_key(request.tenant, known.name), client_session_id=known.name)
        fork = Fork(known.worker_id, known.tokens) if session is UNKNOWN else None
        return Found(named, fork, goes_on=True, is_unnamed=True)


def _follows(request: RoundRequest, session: Session, overlap: Overlap) -> bool:
    """Whether a prompt continues a context. Clients may have written the last output in another way.

    A context that loses but a few pages is continued too. It is not worth a branch.
    """
    kept = overlap.common_tokens + _SLACK_TOKENS >= session.prompt_tokens
    return kept or min(overlap.known_tokens, request.prompt_tokens) - overlap.common_tokens < LEAST_TOKENS


_SLACK_TOKENS = 8
"""At the end of a prompt, that begin an answer: templates leave some of them out of the history, such as the beginning
of a thought."""


@dataclass(frozen=True, slots=True)
class _Unnamed:
    """The last round of a session that no client has named.

    Attributes:
        name: that it has got here; "": it has had one round.
    """

    tokens: int
    worker_id: str
    name: str
    expires_s: float


_BLOCK_BYTES = 128 * TOKEN_BYTES
_MOST_UNNAMED = 65_536
"""Rounds that can be continued. Each takes about 1 kB."""


class _UnnamedRounds:
    """Prompts by their digest: those of the last round of each session without a client's name.

    A prompt is named by the chain of digests over its whole blocks, and by the tokens behind them.
    """

    def __init__(self, ttl_s: float, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._tails: OrderedDict[bytes, OrderedDict[bytes, _Unnamed]] = OrderedDict()
        self._count = 0

    def add(self, request: RoundRequest, worker_id: str) -> None:
        prompt = request.prompt[: -_SLACK_TOKENS * TOKEN_BYTES]
        if len(prompt) < LEAST_TOKENS * TOKEN_BYTES:
            return
        *_, (at, digest) = _blocks(request.tenant, prompt)
        tails = self._tails.setdefault(digest, OrderedDict())
        self._tails.move_to_end(digest)
        self._count += prompt[at:] not in tails
        tails[prompt[at:]] = _Unnamed(
            request.prompt_tokens, worker_id, request.client_session_id or "", self._clock() + self._ttl_s
        )
        while self._count > _MOST_UNNAMED:
            _, dropped = self._tails.popitem(last=False)
            self._count -= len(dropped)

    def take(self, request: RoundRequest) -> _Unnamed | None:
        """The longest prompt that this one continues. Nothing else can continue it afterwards."""
        if not self._tails:
            return None
        prompt, found = request.prompt, None
        for at, digest in _blocks(request.tenant, prompt):
            for size in {len(tail) for tail in self._tails.get(digest, ())}:
                tail = prompt[at : at + size]
                known = self._tails[digest].get(tail)
                if known is not None and known.tokens < request.prompt_tokens:
                    found = (digest, tail, known) if found is None or known.tokens > found[2].tokens else found
        if found is None:
            return None
        digest, tail, known = found
        del self._tails[digest][tail]
        self._count -= 1
        if not self._tails[digest]:
            del self._tails[digest]
        return known if known.expires_s > self._clock() else None


def _blocks(tenant: str, prompt: bytes) -> Iterator[tuple[int, bytes]]:
    """Where the whole blocks of a prompt end, and the digest of all before; the first one is empty."""
    running = sha256(tenant.encode("utf-8", "surrogatepass") + b"\0")
    yield 0, running.digest()
    view = memoryview(prompt)
    for at in range(_BLOCK_BYTES, len(prompt) + 1, _BLOCK_BYTES):
        running.update(view[at - _BLOCK_BYTES : at])
        yield at, running.digest()
