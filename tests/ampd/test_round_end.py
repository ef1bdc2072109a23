"""What a worker tells a coordinator, and the chunks that both make."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.call_signatures import Signer, Verifier
from ampd.round_end import Begun, RoundEnded, cut_told, encode_told, error_chunk, merged_usage

KEYS = (b"k" * 32,)
HERE = "127.0.0.1:7"
REPORT: Any = {
    **dict.fromkeys(("held_tokens", "cached_tokens", "kv_read_tokens", "kv_read_bytes"), 1),
    **dict.fromkeys(("queued_s", "prefill_s", "kv_read_s"), 0.5),
}


def read(*frames: bytes, keys: tuple[bytes, ...] = KEYS, verifier: Verifier | None = None) -> list[Any]:
    buffer, told = bytearray(), list[Any]()
    for byte in b"".join(frames):
        buffer.append(byte)
        told += cut_told(buffer, verifier or Verifier(keys, HERE))
    return told


@pytest.mark.parametrize("keys", [(), KEYS])
def test_a_message_arrives_as_it_was_sent(keys: tuple[bytes, ...]) -> None:
    signer = Signer(keys, "w")
    told: list[Any] = [Begun("r"), RoundEnded("r", "complete", bytes(8), True, 0.5, 0.01, decode=REPORT)]
    assert read(*(encode_told(each, signer, HERE) for each in told), keys=keys) == told


def test_a_message_of_a_stranger_is_not_taken() -> None:
    frame = encode_told(Begun("r"), Signer(KEYS, "w"), HERE)
    for wrong in (
        encode_told(Begun("r"), Signer((), "w"), HERE),
        encode_told(Begun("r"), Signer((b"x" * 32,), "w"), HERE),
        encode_told(Begun("r"), Signer(KEYS, "w"), "127.0.0.1:8"),
        frame[:-1] + bytes([frame[-1] ^ 1]),
    ):
        with pytest.raises(ValueError, match="signature"):
            read(wrong)
    verifier = Verifier(KEYS, HERE)
    read(frame, verifier=verifier)
    with pytest.raises(ValueError, match="repeated"):
        read(frame, verifier=verifier)


@pytest.mark.parametrize(
    "told",
    [
        RoundEnded("r", "complete", b"123"),
        RoundEnded("r", "complete", decode={**REPORT, "decode_batch": 1}),  # type: ignore[arg-type]
        RoundEnded("r", "complete", decode={**REPORT, "held_tokens": -1}),  # type: ignore[arg-type]
        RoundEnded("r", "nonsense"),  # type: ignore[arg-type]
        {"type": "Strange"},
    ],
)
def test_a_malformed_message_is_not_taken(told: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        read(encode_told(told, Signer(KEYS, "w"), HERE))


def test_a_message_that_is_too_long_is_not_read() -> None:
    with pytest.raises(ValueError, match="too long"):
        read(b"\xff\xff\xff\xff")


@given(st.integers(1, 9999), st.integers(0, 9999), st.none() | st.integers(0, 20_000))
def test_usage_adds_up(prompt: int, completion: int, cached: int | None) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {"audio_tokens": 0}}
    merged = merged_usage(usage, prompt, completion, cached)
    assert merged["total_tokens"] == merged["prompt_tokens"] + merged["completion_tokens"] == prompt + completion
    details = merged["prompt_tokens_details"]
    assert details["audio_tokens"] == 0
    assert details.get("cached_tokens") == (None if cached is None else min(cached, prompt))
    assert usage["prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("status", "error_class"),
    [(400, "InvalidRequest"), (429, "RateLimited"), (500, "Internal"), (503, "Unavailable"), (418, "Internal")],
)
def test_an_error_is_an_event_whose_class_has_the_status(status: int, error_class: str) -> None:
    text = 'too many; "retry after 3 s"'
    chunk = error_chunk(status, text)
    assert (chunk["_dynamo_annotated"], chunk["event"], chunk["comment"]) == (True, "error", [text])
    assert (chunk["error"]["class"], chunk["error"]["public"]) == (error_class, {"type": "message", "message": text})
