"""Some changed inputs for every parser and every receiver of a message; `python -m benchmarks.fuzz` has more."""

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fuzz.__main__ import all_targets, main
from benchmarks.fuzz.mutations import changed
from benchmarks.fuzz.target import Failure, Target, try_one
from workloads.formats import FORMATS

NAMES = [
    "trace",
    *(f"format {name}" for name in (*FORMATS, "trail")),
    *("replies", "model config"),
    *("settings", "policy", "state-url", "profile", "request", "continued request", "session headers"),
    *("view", "task", "role", "event"),
    *("coordinator", "snapshot", "round report", "end of a round", "error text", "signature", "descriptor"),
    *("prefill request", "generate request", "KV request", "KV reply", "KV read", "KV answer at a coordinator"),
    *("message to a rank", "message to the worker", "session request"),
    *("tokenizer digest", "chat template", "weights digest", "model folder", "model of the doctor"),
    *("tokenizer of a trace", "routing table"),
    *("stream of an endpoint", "list of models", "answer about sessions", "answer about readiness"),
    *("answer through the relay", "request to the relay"),
    *("answer of Redis", "message of Redis"),
    *("listing of GPUs", "file of a local graph", "notes of a build", "request to SGLang", "part of SGLang"),
]


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, Target]]:
    with all_targets() as targets:
        yield {target.name: target for target in targets}


@pytest.fixture(autouse=True)
def _without_logs() -> Iterator[None]:
    """A log line may name a part of an input. If that is no valid Unicode, pytest-xdist cannot send the line."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_all_targets_are_tried_here(targets: dict[str, Target]) -> None:
    assert sorted(targets) == sorted(NAMES)


def test_the_documents_name_as_many_receivers() -> None:
    text = (Path(__file__).parents[2] / "benchmarks" / "README.md").read_text("utf-8")
    assert f"each of {len(NAMES)} receivers" in text


@pytest.mark.parametrize("name", NAMES)
def test_changed_inputs_are_accepted_or_refused(targets: dict[str, Target], name: str) -> None:
    @settings(max_examples=40, deadline=None, database=None)
    @given(st.integers(0, 2**32))
    def try_some(seed: int) -> None:
        verdict = try_one(targets[name], str(seed))
        assert not isinstance(verdict, Failure), verdict

    try_some()


def test_failures_are_found_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    def run(value: int) -> None:
        if value % 3 == 0:
            raise ZeroDivisionError
        assert value % 3 == 1
        raise UnicodeError

    broken = Target("broken", lambda rng: rng.randrange(3000), run, (UnicodeError,))
    verdicts = [try_one(broken, str(seed)) for seed in range(60)]
    assert {verdict.kind if isinstance(verdict, Failure) else verdict for verdict in verdicts} == {
        *("crash", "wrong decision", "refused")
    }
    assert main(["--inputs", "20", "--only", "policy"]) == 0
    assert "20 inputs, 0 failed" in capsys.readouterr().out


def test_a_change_leaves_the_original_as_it_was() -> None:
    original = {"a": [1, {"b": "text"}], "c": b"bytes"}
    results = {repr(changed(random.Random(seed), original)) for seed in range(200)}
    assert original == {"a": [1, {"b": "text"}], "c": b"bytes"}
    assert len(results) > 100
