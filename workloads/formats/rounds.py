"""From recorded requests to sessions: which requests are one session, in which order, with which tokens and times."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from statistics import median_low

from ampd.errors import UserError
from workloads.formats.loader import Rows, TokenCounter, approximate_tokens
from workloads.trace import Round, Session, SharedPrefix

HEADER_TOKENS = 3
"""Tokens of a chat template before a message: start marker, role, new line (ChatML)."""
END_TOKENS = 1
"""Tokens of a chat template after a message."""
ASSUMED_OUTPUT_TOKENS = 128

Block = int | str | tuple[str, int | str]
"""The hash of a block."""


@dataclass(slots=True)
class Request:
    """One model call as a source records it. What it does not record is None or empty.

    Attributes:
        where: its place in the source, for messages.
        session: None: the request continues the session whose prompt and answer it begins with, or stands alone.
        part: of a source whose names may stand for several sessions, what tells these apart.
        start_s, end_s: seconds since any origin that the whole source has in common.
        gap_s: recorded seconds between the previous call and this one. It goes before the times.
        prompt_tokens, output_tokens: recorded usage. It goes before counting the words. 0: a call that failed.
        increment: the recorded prompt tokens are only what is new to the session.
        cached_tokens: how much of the prompt was in the provider's cache.
        system_prompt: names the system prompt of calls whose first prompts share what the cache had of them.
        messages, answer: their words.
        bare_answer: the answer without reasoning, as later prompts repeat it; None: it has none.
        system_messages: how many of the first messages are tools and system prompts, which agents of a kind share.
        hashes: of the prompt's blocks of `block_tokens` tokens.
        rewritten: nothing of the context before is kept.
    """

    where: str
    session: str | None = None
    part: str | None = None
    start_s: float | None = None
    end_s: float | None = None
    gap_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    increment: bool = False
    cached_tokens: int | None = None
    system_prompt: str | None = None
    messages: Sequence[str] = ()
    answer: str | None = None
    bare_answer: str | None = None
    system_messages: int = 0
    hashes: Sequence[Block] = ()
    block_tokens: int = 0
    rewritten: bool = False


def _to_stderr(message: str) -> None:
    print(message, file=sys.stderr)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of a conversion.

    Attributes:
        count_tokens: counts the tokens of words where the source records none.
        with_text: keep the words of every increment, for replays with real words.
        note: called with one line for each kind of input that is left out or assumed.
    """

    count_tokens: TokenCounter = approximate_tokens
    with_text: bool = False
    note: Callable[[str], None] = _to_stderr


Reader = Callable[[Rows], Iterator[Request]]
"""What each format has: the requests in the rows of its files. Raises `UserError` with file and line."""


def sessions_of(requests: Iterable[Request], path: Path, options: LoadOptions) -> Iterator[Session]:
    """The sessions of a source, in the order of their first requests.

    The gap before a round runs from the end of the previous request, or from its start if no end is recorded, because
    then the time of the answer cannot be told apart. Arrivals count from the first request of the source.
    """
    by_session = _by_session(_in_order(_with_tokens(requests, path, options)), path, options)
    starts_s = [start_s for items in by_session.values() if (start_s := items[0].start_s) is not None]
    origin_s = min(starts_s, default=0.0)
    shared = _Shared(by_session.values(), options)
    untimed = 0
    for (name, _), items in by_session.items():
        calls: list[Call] = []
        for request in items:
            previous = items[len(calls) - 1] if calls else None
            calls.append(_call(request, previous, calls[-1] if calls else None, options))
            untimed += previous is not None and None in (request.start_s, previous.start_s) and request.gap_s is None
        start_s = items[0].start_s
        yield Session(
            session_id=name,
            arrival_s=0.0 if start_s is None else round(start_s - origin_s, 6),
            rounds=rounds_of(calls, items[0].where),
            shared_prefix=shared.prefix_of(items[0], calls[0]),
        )
    if untimed:
        options.note(f"{path}: {untimed} later requests have no time that can be read, so the gap before them is 0")


def _with_tokens(requests: Iterable[Request], path: Path, options: LoadOptions) -> list[Request]:
    """Without the requests that failed, and with a length for the answers that nobody recorded."""
    kept: list[Request] = []
    left_out: list[str] = []
    for request in requests:
        has_prompt = bool(request.prompt_tokens) or (bool(request.messages) and request.prompt_tokens is None)
        has_output = request.output_tokens != 0 or bool(request.answer)
        if has_prompt and has_output:
            kept.append(request)
        else:
            left_out.append(request.where)
    if left_out:
        options.note(f"{path}: {len(left_out)} requests without tokens, left out (the first: {left_out[0]})")
    unknown = [request for request in kept if request.output_tokens is None and request.answer is None]
    if unknown:
        known = [tokens for request in kept if (tokens := request.output_tokens)]
        assumed = median_low(known) if known else ASSUMED_OUTPUT_TOKENS
        why = "the median of the others" if known else "an assumption"
        options.note(f"{path}: {len(unknown)} requests do not say how long their answer is; {assumed} tokens ({why})")
        for request in unknown:
            request.output_tokens = assumed
    return kept


def _in_order(requests: list[Request]) -> list[Request]:
    """By time if all have one, because logs are also written newest first; else as they stand in the source."""
    if all(request.start_s is not None for request in requests):
        requests.sort(key=lambda request: request.start_s or 0.0)
    return requests


def _by_session(
    requests: list[Request], path: Path, options: LoadOptions
) -> dict[tuple[str, str | None], list[Request]]:
    by_session: dict[tuple[str, str | None], list[Request]] = {}
    chains, unnamed, chained = _Chains(), 0, 0
    for request in requests:
        name = request.session
        if name is None and request.messages:
            name = chains.taken(request)
            unnamed += 1
            chained += name is not None
        name = name or Path(request.where).name
        if request.answer is not None:
            chains.put(request, name)
        by_session.setdefault((name, request.part), []).append(request)
    for key, items in list(by_session.items()):
        lanes = _lanes(_in_order(items)) if key[1] is None else [items]
        by_session[key] = lanes[0]
        by_session |= {(f"{key[0]}/branch{number}", None): lane for number, lane in enumerate(lanes[1:], start=2)}
    if unnamed:
        options.note(
            f"{path}: {unnamed} requests name no session; {chained} of them begin with the messages and the answer of "
            "an earlier one and are its next round, the others begin a session"
        )
    return by_session


def _lanes(items: list[Request]) -> list[list[Request]]:
    """The contexts that a name stands for, such as an agent with the sub-agents that send its session id.

    A prompt with another first message begins a context, because its tools or its system prompt differ. Only contexts
    that alternate are apart: a context that none goes back to was rewritten, as by an agent with a date in its prompt.
    """
    if not all(request.messages for request in items):
        return [items]
    firsts = [request.messages[0] for request in items]
    ends = {first: at for at, first in enumerate(firsts)}
    lanes: list[list[Request]] = []
    busy_until: list[int] = []
    lane_of: dict[str, int] = {}
    for at, (first, request) in enumerate(zip(firsts, items, strict=True)):
        if first not in lane_of:
            free = [lane for lane, end in enumerate(busy_until) if end < at]
            lane_of[first] = free[0] if free else len(lanes)
            if not free:
                lanes.append([])
                busy_until.append(0)
            busy_until[lane_of[first]] = ends[first]
        lanes[lane_of[first]].append(request)
    return lanes


class _Chains:
    """Finds the session that a request without a name continues.

    Its prompt begins with all messages of a request there, and with the answer, with or without the reasoning.
    """

    def __init__(self) -> None:
        self._sessions: dict[int, list[str]] = {}

    def taken(self, request: Request) -> str | None:
        """The session with the longest context that the prompt begins with. Only one request continues a context."""
        for context in reversed(_hashes(request.messages)):
            if sessions := self._sessions.get(context):
                return sessions.pop()
        return None

    def put(self, request: Request, session: str) -> None:
        for answer in {request.answer, request.bare_answer} - {None}:
            context = _hashes((*request.messages, str(answer)))[-1]
            self._sessions.setdefault(context, []).append(session)


def _hashes(messages: Sequence[str]) -> list[int]:
    """A hash of the first message, of the first two, and so on."""
    return list(accumulate(messages, lambda before, words: hash((before, words)), initial=0))[1:]


# -- the tokens of a request


def _call(request: Request, previous: Request | None, before: Call | None, options: LoadOptions) -> Call:
    counted = _tokens(request.messages, options) + HEADER_TOKENS if request.prompt_tokens is None else 0
    prompt_tokens = request.prompt_tokens or counted
    if request.increment and before:
        prompt_tokens += before.prompt_tokens + before.output_tokens
    new, shared = request.messages, 0 if request.rewritten else None
    if previous and before and request.messages and previous.messages and not request.increment:
        context = (*previous.messages, *([] if previous.answer is None else [previous.answer]))
        common = common_prefix(context, request.messages)
        new = request.messages[common:]
        if shared is None:
            shared = _shared_words(request, previous, common, before, options)
    return Call(
        prompt_tokens=prompt_tokens,
        output_tokens=request.output_tokens or max(1, options.count_tokens(request.answer or "")) + END_TOKENS,
        gap_s=_gap_s(previous, request) if previous else 0.0,
        hashes=request.hashes,
        block_tokens=request.block_tokens,
        shared_tokens=shared,
        cached_tokens=request.cached_tokens,
        text="\n".join(new) if options.with_text and request.messages else None,
    )


def _shared_words(request: Request, previous: Request, common: int, before: Call, options: LoadOptions) -> int:
    """Tokens of the previous prompt that this one begins with, by their words: all, if the answer follows them."""
    if common > len(previous.messages):
        return before.prompt_tokens
    if request.prompt_tokens is None:
        return _tokens(request.messages[:common], options)
    if common == len(previous.messages):
        # Sources that record usage often write an answer in another form than later prompts repeat it.
        follows = request.messages[common] if common < len(request.messages) else None
        dropped = previous.bare_answer is not None and follows == previous.bare_answer
        return before.prompt_tokens - (HEADER_TOKENS if dropped else 0)
    whole = _tokens(request.messages, options)
    return request.prompt_tokens * _tokens(request.messages[:common], options) // whole if whole else 0


def _gap_s(previous: Request, request: Request) -> float:
    if request.gap_s is not None:
        return request.gap_s
    before_s = previous.end_s if previous.end_s is not None else previous.start_s
    return 0.0 if request.start_s is None or before_s is None else request.start_s - before_s


def _tokens(messages: Sequence[str], options: LoadOptions) -> int:
    return sum(options.count_tokens(words) + HEADER_TOKENS + END_TOKENS for words in messages)


# -- what the first prompts of several sessions begin with


class _Shared:
    """The shared prefixes of a source: by the hashes of blocks, by system messages, or by what the cache had."""

    def __init__(self, sessions: Iterable[Sequence[Request]], options: LoadOptions) -> None:
        self._options = options
        by_block: dict[Block, list[Request]] = {}
        self._cached: dict[str, int] = {}
        for first, *_ in sessions:
            if first.hashes and first.block_tokens:
                by_block.setdefault(first.hashes[0], []).append(first)
            if first.system_prompt and first.cached_tokens:
                least = self._cached.get(first.system_prompt, first.cached_tokens)
                self._cached[first.system_prompt] = min(least, first.cached_tokens)
        self._blocks = {block: _common_blocks(firsts) for block, firsts in by_block.items() if len(firsts) > 1}
        self._system = Counter(first.system_prompt for first, *_ in sessions if first.cached_tokens)

    def prefix_of(self, first: Request, call: Call) -> SharedPrefix | None:
        if first.hashes and first.block_tokens:
            return self._by_blocks(first, call)
        if words := first.messages[: first.system_messages]:
            tokens = _tokens(words, self._options)
            if first.prompt_tokens is not None:
                tokens = first.prompt_tokens * tokens // (_tokens(first.messages, self._options) or 1)
            name = sha256(json.dumps(list(words)).encode()).hexdigest()[:16]
            return SharedPrefix(id=f"system-{name}", tokens=max(1, min(tokens, call.prompt_tokens)))
        if first.cached_tokens and first.system_prompt and self._system[first.system_prompt] > 1:
            tokens = min(self._cached[first.system_prompt], call.prompt_tokens)
            return SharedPrefix(id=f"system-{first.system_prompt}", tokens=tokens)
        return None

    def _by_blocks(self, first: Request, call: Call) -> SharedPrefix | None:
        shared = common_prefix(first.hashes, self._blocks.get(first.hashes[0], ()))
        if not shared:
            return None
        return SharedPrefix(id=f"block-{first.hashes[0]}", tokens=min(shared * first.block_tokens, call.prompt_tokens))


def _common_blocks(firsts: Sequence[Request]) -> Sequence[Block]:
    """The blocks that two or more prompts with the same first block begin with.

    A prompt that ends within these blocks leaves them to the longer ones. Its last block may have another hash, because
    it is not full.
    """
    longest, second, *shorter = sorted(firsts, key=_full_blocks, reverse=True)
    common = longest.hashes[: common_prefix(longest.hashes, second.hashes)]
    for first in shorter:
        equal = common_prefix(common, first.hashes)
        if equal < _full_blocks(first):
            common = common[:equal]
    return common


def _full_blocks(first: Request) -> int:
    return min(len(first.hashes), (first.prompt_tokens or 0) // first.block_tokens)


# -- turns the prompts of successive model calls into the rounds of a session: kept context and new tokens


@dataclass(frozen=True, slots=True)
class Call:
    """One model call of a session, with its tokens.

    Attributes:
        prompt_tokens: the whole prompt.
        output_tokens: generated tokens.
        gap_s: seconds between the end of the previous call and this one.
        hashes: of the prompt's blocks of `block_tokens` tokens; empty if the source has none.
        shared_tokens: without hashes, the tokens of the previous PROMPT that are a prefix of this one; None: unknown.
        cached_tokens: what the provider's cache had of the prompt; None: unknown.
        text: the new words of this prompt.
    """

    prompt_tokens: int
    output_tokens: int
    gap_s: float = 0.0
    hashes: Sequence[Block] = ()
    block_tokens: int = 0
    shared_tokens: int | None = None
    cached_tokens: int | None = None
    text: str | None = None


def rounds_of(calls: Sequence[Call], where: str) -> tuple[Round, ...]:
    """Rounds of one session.

    A prompt that is longer than the previous prompt with its output, and is not known to diverge from it, extends it.
    The agent rewrote any other prompt, which keeps only tokens that are known to be shared. These are the tokens that
    the source records (at most the previous prompt, because a dropped output is not shared). If it records none, they
    are the whole previous prompt if this one is longer, else none. At least one token of a prompt is new.

    Raises:
        UserError: a call without prompt or output tokens.
    """
    rounds: list[Round] = []
    previous: Call | None = None
    for index, call in enumerate(calls):
        if call.prompt_tokens < 1 or call.output_tokens < 1:
            raise UserError(f"{where}: call {index} has no prompt or no output tokens")
        keep = _keep_tokens(previous, call)
        base = previous.prompt_tokens + previous.output_tokens if keep is None and previous else keep or 0
        rounds.append(
            Round(
                incr_tokens=call.prompt_tokens - base,
                output_tokens=call.output_tokens,
                tool_s=round(max(call.gap_s, 0.0), 6) if previous else 0.0,
                keep_tokens=keep,
                text=call.text,
            )
        )
        previous = call
    return tuple(rounds)


def common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    """Number of equal items at the beginning of two sequences."""
    pairs = zip(left, right, strict=False)
    return next((index for index, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(left), len(right)))


def _keep_tokens(previous: Call | None, call: Call) -> int | None:
    if previous is None:
        return None
    shared = _shared_tokens(previous, call)
    diverges = shared is not None and shared < previous.prompt_tokens
    if call.prompt_tokens > previous.prompt_tokens + previous.output_tokens and not diverges:
        return None
    if shared is None:
        shared = previous.prompt_tokens if call.prompt_tokens > previous.prompt_tokens else 0
    return max(0, min(shared, previous.prompt_tokens, call.prompt_tokens - 1))


def _shared_tokens(previous: Call, call: Call) -> int | None:
    """Tokens of the previous prompt that this one shares, by the block hashes if both have them.

    Only full blocks can be compared. If this prompt shares all full blocks of the previous one, it shares the whole
    prompt, because the last, partial block changes its hash as soon as it fills. The provider's cache also shrinks
    when an entry expires, so it counts only if the prompt is not longer than the context before it, or if its words
    diverge (the system prompt, which a source may not record, is still kept).
    """
    if previous.hashes and call.hashes and call.block_tokens:
        common = common_prefix(previous.hashes, call.hashes)
        full_blocks = previous.prompt_tokens // call.block_tokens
        return previous.prompt_tokens if common >= full_blocks else common * call.block_tokens
    diverges = call.shared_tokens is not None and call.shared_tokens < previous.prompt_tokens
    if call.cached_tokens is None or not (
        diverges or call.prompt_tokens <= previous.prompt_tokens + previous.output_tokens
    ):
        return call.shared_tokens
    return max(call.cached_tokens, call.shared_tokens or 0)
