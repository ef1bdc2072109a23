"""Turns the prompts of successive model calls into the rounds of a session: kept context and new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampd.errors import UserError
from workloads.trace import Round


@dataclass(frozen=True, slots=True)
class Call:
    """One model call as recorded by a source.

    Attributes:
        prompt_tokens: the whole prompt.
        output_tokens: generated tokens.
        gap_s: seconds between the end of the previous call and this one.
        hashes: of the prompt's blocks of `block_tokens` tokens; empty if the source has none.
        shared_tokens: without hashes, the tokens of the previous PROMPT that are a prefix of this one; None: unknown.
        text: the new words of this prompt.
    """

    prompt_tokens: int
    output_tokens: int
    gap_s: float = 0.0
    hashes: Sequence[int] = ()
    block_tokens: int = 0
    shared_tokens: int | None = None
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
    prompt, because the last, partial block changes its hash as soon as it fills.
    """
    if not (previous.hashes and call.hashes and call.block_tokens):
        return call.shared_tokens
    common = common_prefix(previous.hashes, call.hashes)
    full_blocks = previous.prompt_tokens // call.block_tokens
    return previous.prompt_tokens if common >= full_blocks else common * call.block_tokens
