"""Signatures of calls: which are accepted, and what may not be changed, kept or sent elsewhere."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.call_signatures import (
    LOOPBACK,
    MAX_AGE_S,
    RPC_HOST,
    SIGNATURE,
    SignatureFault,
    Signer,
    Verifier,
    check_closed,
    claimed_caller,
    read_secrets,
)
from ampd.errors import UserError

OLD, NEW, FOREIGN = b"o" * 32, b"n" * 32, b"f" * 32
MESSAGE = {
    "task": {"session_id": "agent-7", "arrival_s": -0.1},
    "token_ids": [1, 2, 3],
    "source_worker_id": None,
    "request": {"sampling_options": {"temperature": 0.5}},
}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def signed(
    message: Any = MESSAGE, key: bytes = NEW, endpoint: str = "generate", worker: str = "w1", clock: Any = None
) -> dict[str, str]:
    metadata: dict[str, str] = {}
    Signer((key,), "coordinator-1", clock or Clock()).sign(metadata, endpoint, worker, message)
    return metadata


def verifier(*keys: bytes, clock: Any = None) -> Verifier:
    return Verifier(keys or (NEW,), "w1", clock or Clock())


def test_a_signed_call_is_accepted_once() -> None:
    check, metadata = verifier(), signed()
    assert check.refusal(metadata, "generate", MESSAGE) is None
    assert check.refusal(metadata, "generate", MESSAGE) is SignatureFault.REPEATED
    assert check.refusal(signed(), "generate", MESSAGE) is None
    assert claimed_caller(metadata) == "coordinator-1"


def test_without_a_secret_nothing_is_signed_and_everything_is_accepted() -> None:
    metadata: dict[str, str] = {}
    Signer((), "c").sign(metadata, "generate", "w1", MESSAGE)
    assert metadata == {}
    assert Verifier((), "w1").refusal(metadata, "generate", MESSAGE) is None


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({}, SignatureFault.MISSING),
        ({SIGNATURE: ""}, SignatureFault.MISSING),
        ({SIGNATURE: "1 c 1 2 3"}, SignatureFault.WRONG),
        (signed(key=FOREIGN), SignatureFault.WRONG),
        (signed(endpoint="kv"), SignatureFault.WRONG),
        (signed(worker="w2"), SignatureFault.WRONG),
        ({SIGNATURE: signed()[SIGNATURE].replace("coordinator-1", "coordinator-2")}, SignatureFault.WRONG),
        ({SIGNATURE: re.sub(r" 1000000 ", " 1000001 ", signed()[SIGNATURE])}, SignatureFault.WRONG),
    ],
)
def test_other_calls_are_refused(metadata: dict[str, str], reason: SignatureFault) -> None:
    assert verifier().refusal(metadata, "generate", MESSAGE) is reason


@pytest.mark.parametrize(
    "message",
    [
        {**MESSAGE, "token_ids": [1, 2, 4]},
        {**MESSAGE, "token_ids": [1, 2]},
        {**MESSAGE, "token_ids": [1, 2, 1 << 40]},
        {**MESSAGE, "source_worker_id": "w2"},
        {**MESSAGE, "task": {"session_id": "agent-8", "arrival_s": -0.1}},
        {**MESSAGE, "more": 1},
        {},
        [],
        None,
        {1: 2, "a": 3},
    ],
)
def test_a_changed_message_is_refused(message: Any) -> None:
    assert verifier().refusal(signed(), "generate", message) is SignatureFault.WRONG


def test_page_keys_are_signed_as_they_are_divided() -> None:
    message = {"op": "lease", "keys": [b"ab", b"cd"], "ttl_s": 7.0}
    metadata = signed(message)
    for keys in ([b"abcd"], [b"a", b"b", b"c", b"d"], [b"ab", b"ce"], [b"abc", b"d"], []):
        assert verifier().refusal(metadata, "generate", {**message, "keys": keys}) is SignatureFault.WRONG
    assert verifier().refusal(metadata, "generate", message) is None


def test_time_of_a_call() -> None:
    for age_s, expected in (
        (MAX_AGE_S, None),
        (MAX_AGE_S + 1, SignatureFault.OLD),
        (-MAX_AGE_S - 1, SignatureFault.OLD),
    ):
        clock = Clock()
        metadata = signed(clock=clock)
        clock.now_s += age_s
        assert verifier(clock=clock).refusal(metadata, "generate", MESSAGE) is expected


@given(st.lists(st.floats(0, MAX_AGE_S), max_size=20), st.floats(0, MAX_AGE_S))
def test_a_repeated_call_is_refused_for_as_long_as_its_time_is_accepted(pauses_s: list[float], wait_s: float) -> None:
    clock = Clock()
    check, metadata = verifier(clock=clock), signed(clock=clock)
    assert check.refusal(metadata, "generate", MESSAGE) is None
    passed_s = 0.0
    for pause_s in [*pauses_s, wait_s]:
        clock.now_s += pause_s
        passed_s += pause_s
        check.refusal(signed(clock=clock), "generate", MESSAGE)
        assert check.refusal(metadata, "generate", MESSAGE) in (SignatureFault.REPEATED, SignatureFault.OLD)


def test_old_numbers_are_forgotten() -> None:
    clock = Clock()
    check = verifier(clock=clock)
    for _ in range(100):
        clock.now_s += MAX_AGE_S
        assert check.refusal(signed(clock=clock), "generate", MESSAGE) is None
    assert len(check._seen) + len(check._seen_before) < 10


def test_during_a_rotation_both_secrets_are_accepted() -> None:
    check = verifier(NEW, OLD)
    assert check.refusal(signed(key=OLD), "generate", MESSAGE) is None
    assert check.refusal(signed(key=NEW), "generate", MESSAGE) is None
    assert check.refusal(signed(key=FOREIGN), "generate", MESSAGE) is SignatureFault.WRONG


def test_a_file_of_secrets(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(NEW + b"\n\n" + OLD + b"\r\n")
    assert read_secrets(path, "p") == (NEW, OLD)
    assert read_secrets(None, "p") == ()


@pytest.mark.parametrize("content", [None, b"", b"\n", b"S3cr3t", NEW + b"\nS3cr3t\n"])
def test_a_file_that_is_no_use_is_one_line_without_a_secret(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="--graph-secret-file") as caught:
        read_secrets(path, "p")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "S3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    ("has_secret", "host", "is_closed"),
    [
        (False, "127.0.0.1", True),
        (False, "127.8.8.8", True),
        (False, "::1", True),
        (False, "localhost", True),
        (False, "10.0.0.7", False),
        (False, "0.0.0.0", False),
        (False, "", False),
        (False, None, False),
        (True, "10.0.0.7", True),
        (True, None, True),
    ],
)
def test_a_member_that_anybody_may_call_does_not_start(has_secret: bool, host: str | None, is_closed: bool) -> None:
    environment = {} if host is None else {"DYN_TCP_RPC_HOST": host}
    with nullcontext() if is_closed else pytest.raises(UserError, match="p: --graph-secret-file is missing") as caught:
        check_closed(Path("secret") if has_secret else None, "p", environment)
    assert is_closed or "\n" not in str(caught.value)


@pytest.mark.parametrize("variable", list(LOOPBACK))
def test_a_member_without_a_secret_uses_no_other_interface(variable: str) -> None:
    environment = {RPC_HOST: "127.0.0.1"}
    check_closed(None, "p", environment)
    assert environment == LOOPBACK
    environment[variable] = "10.0.0.7" if variable == RPC_HOST else "eth0"
    with pytest.raises(UserError, match=f"{variable}=") as caught:
        check_closed(None, "p", environment)
    assert "\n" not in str(caught.value)
    check_closed(Path("secret"), "p", environment)
