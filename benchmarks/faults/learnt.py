"""Right answers that are learnt: those of the same session as another tenant, so that no KV of it is used again.

SGLang's answers cannot be computed beforehand. The tokens of a round must be those of the same round in the session
that was learnt, at temperature 0, whatever happened to either of them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from benchmarks.faults.load import Agent, RoundResult
from benchmarks.faults.tokens import random_prompt

LEARNT = "-learnt"
"""End of the id of a session that is learnt."""

_TENANT = {"nvext": {"extra_fields": ["engine_data"], "cache_salt": "learnt"}}


def tenant_options(session_id: str) -> Mapping[str, Any]:
    """The options of all rounds of a session that name its tenant."""
    return _TENANT if session_id.endswith(LEARNT) else {}


class LearntTexts:
    """The answers that were learnt so far.

    Clients get texts, from which the tokens cannot be told. The context of a next round has other tokens in place of an
    answer, always the same ones.
    """

    def __init__(self) -> None:
        self._texts: dict[tuple[tuple[int, ...], int], str] = {}

    def output(self, prompt: Sequence[int], count: int) -> list[int]:
        """Tokens that stand for the answer."""
        return random_prompt(random.Random(repr(list(prompt))), count)

    def text(self, prompt: Sequence[int], count: int) -> str | None:
        """The learnt answer; None: it was not learnt."""
        return self._texts.get((tuple(prompt), count))

    async def learn(
        self,
        agent: Agent,
        increment_tokens: int,
        output_tokens: int,
        *,
        is_final: bool = False,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> RoundResult:
        """Run the next round of a session whose id ends with `LEARNT`, and note its answer if it completes."""
        options = {**options, **tenant_options(agent.session_id)}
        result = await agent.round(increment_tokens, output_tokens, options=options, is_final=is_final)
        if result.finish_reason == "length":
            self._texts[tuple(agent.prompt), output_tokens] = result.text
        return result
