"""Answers that are learnt: a session as another tenant, and then the same one, whose texts must be equal."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.faults.learnt import LEARNT, LearntTexts
from benchmarks.faults.load import Agent, Client, Ending


class Scripted(Client):
    """A client of a graph that gives one answer after the other.

    Attributes:
        tenants: of the requests.
    """

    def __init__(self, learnt: LearntTexts, *texts: str) -> None:
        super().__init__(lambda: ["http://graph"], learnt, 20.0)
        self.tenants: list[str | None] = []
        self._texts = iter(texts)

    async def _stream(self, _url: str, body: Mapping[str, Any], _headers: Any, result: Any, _on_token: Any) -> None:
        self.tenants.append(body["nvext"].get("cache_salt"))
        result.text, result.finish_reason, result.ending = next(self._texts), "length", Ending.COMPLETED


@pytest.mark.parametrize(("second", "ending"), [("two", Ending.COMPLETED), ("three", Ending.WRONG)])
async def test_the_second_play_must_give_the_texts_of_the_first(second: str, ending: Ending) -> None:
    learnt = LearntTexts()
    client = Scripted(learnt, "one", "two", "one", second, "new")
    teacher, pupil = (Agent(client, learnt, name, random.Random(1)) for name in (f"s{LEARNT}", "s"))
    for _ in range(2):
        await learnt.learn(teacher, 5, 3)
    assert [(await pupil.round(5, 3)).ending for _ in range(2)] == [Ending.COMPLETED, ending]
    # What was never learnt cannot be wrong.
    assert (await pupil.round(5, 3)).ending is Ending.COMPLETED
    assert client.tenants == ["learnt", "learnt", None, None, None]
    await client.close()


async def test_short_answers_are_told_apart() -> None:
    """Tokens that stand for an answer are a poor name of it if there is only one."""
    learnt = LearntTexts()
    names = [f"s{number}{LEARNT}" for number in range(300)]
    client = Scripted(learnt, *names)
    endings = set()
    for number, name in enumerate(names):
        endings.add((await learnt.learn(Agent(client, learnt, name, random.Random(number)), 5, 1)).ending)
    assert endings == {Ending.COMPLETED}
    await client.close()
