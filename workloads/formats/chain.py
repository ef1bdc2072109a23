"""From the prompts of a run of model calls to the rounds of a session: what was kept, what is new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampd.errors import UserError
from workloads.trace import Round


@dataclass(frozen=True, slots=True)
class Call:
    """One model call as a source records it.

    Attributes:
        prompt_tokens: the whole prompt.
        output_tokens: what the model generated.
        gap_s: seconds between the end of the previous call and this one.
        shared_tokens: how much of the previous PROMPT is a prefix of this one; None where the source does not say.
        text: the words that are new in this prompt.
    """

    prompt_tokens: int
    output_tokens: int
    gap_s: float = 0.0
    shared_tokens: int | None = None
    text: str | None = None


def rounds_of(calls: Sequence[Call], where: str) -> tuple[Round, ...]:
    """Rounds of one session.

    A prompt that is longer than the previous prompt with its output, and is not known to diverge from it, extends it.
    Any other prompt was rewritten by the agent and keeps only what is known to be shared: the source's own evidence
    (never more than the previous prompt, since a dropped output is not shared), else the whole previous prompt if this
    one is longer, else nothing. At least one token of a prompt is new.

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


def _keep_tokens(previous: Call | None, call: Call) -> int | None:
    if previous is None:
        return None
    shared = call.shared_tokens
    diverges = shared is not None and shared < previous.prompt_tokens
    if call.prompt_tokens > previous.prompt_tokens + previous.output_tokens and not diverges:
        return None
    if shared is None:
        shared = previous.prompt_tokens if call.prompt_tokens > previous.prompt_tokens else 0
    return max(0, min(shared, previous.prompt_tokens, call.prompt_tokens - 1))


def shared_by_blocks(
    previous: Sequence[int], current: Sequence[int], block_tokens: int, previous_prompt_tokens: int
) -> int:
    """Tokens of the previous prompt that the current one shares, from their block hashes.

    Only full blocks can be compared: if all of the previous prompt's full blocks are shared, all of it counts as
    shared, since the last, partial block changes its hash as soon as it fills.
    """
    common = 0
    for left, right in zip(previous, current, strict=False):
        if left != right:
            break
        common += 1
    full_blocks = previous_prompt_tokens // block_tokens
    return previous_prompt_tokens if common >= full_blocks else common * block_tokens
