"""The trace format: round trip, validation with file and line, and looking traces up."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.errors import UserError
from workloads.trace import (
    Round,
    Session,
    SharedPrefix,
    dump_session,
    kept_tokens,
    load_trace,
    read_trace,
    shipped_traces,
    stream_trace,
    write_trace,
)


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    rounds: list[Round] = []
    context = 0
    for index in range(draw(st.integers(1, 6))):
        keep = draw(st.none() | st.integers(0, context))
        item = Round(
            incr_tokens=draw(st.integers(1, 5000)),
            output_tokens=draw(st.integers(1, 500)),
            tool_s=draw(st.floats(0, 1e6)) if index else 0.0,
            keep_tokens=keep,
            text=draw(st.none() | st.text()),
        )
        context = kept_tokens(item, context) + item.incr_tokens + item.output_tokens
        rounds.append(item)
    arrival = draw(st.floats(0, 1e9))
    shared = st.builds(SharedPrefix, id=st.text(min_size=1), tokens=st.integers(1, rounds[0].incr_tokens))
    return Session(
        session_id=draw(st.text(min_size=1)),
        arrival_s=arrival,
        rounds=tuple(rounds),
        shared_prefix=draw(st.none() | shared),
    )


@pytest.mark.slow
@given(st.lists(sessions(), min_size=1, max_size=4, unique_by=lambda session: session.session_id), st.booleans())
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, traced: list[Session], zipped: bool) -> None:
    path = tmp_path_factory.mktemp("trace") / ("t.jsonl.gz" if zipped else "t.jsonl")
    assert write_trace(traced, path) == len(traced)
    assert list(read_trace(path)) == traced
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@given(sessions())
def test_prompt_lengths_follow_the_definition(session: Session) -> None:
    context = 0
    for (history, increment), item in zip(session.prompts_tokens(), session.rounds, strict=True):
        assert history == (context if item.keep_tokens is None else item.keep_tokens) <= context
        context = history + increment + item.output_tokens
        assert context <= session.max_context_tokens


GOOD = {"session_id": "a", "arrival_s": 0.0, "rounds": [{"incr_tokens": 5, "output_tokens": 2, "tool_s": 0.0}]}
ROUND = {"incr_tokens": 5, "output_tokens": 2, "tool_s": 0.0}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "JSON object"),
        (json.dumps({**GOOD, "color": 1}), "color: unknown field"),
        (json.dumps({**GOOD, "rounds": []}), "rounds"),
        (json.dumps({**GOOD, "rounds": [{"output_tokens": 2}]}), "rounds.0.incr_tokens is missing"),
        (json.dumps({**GOOD, "rounds": [{**ROUND, "incr_tokens": 0}]}), "rounds.0.incr_tokens"),
        (json.dumps({**GOOD, "rounds": [{**ROUND, "incr_tokens": "5"}]}), "rounds.0.incr_tokens"),
        (json.dumps({**GOOD, "rounds": [{**ROUND, "tool_s": 1.0}]}), "rounds.0.tool_s"),
        (json.dumps({**GOOD, "rounds": [ROUND, {**ROUND, "keep_tokens": 8}]}), "rounds.1.keep_tokens: 8 is more"),
        (json.dumps({**GOOD, "rounds": [ROUND, {**ROUND, "keep_tokens": -1}]}), "rounds.1.keep_tokens"),
        (json.dumps({**GOOD, "arrival_s": -1}), "arrival_s"),
        (json.dumps({**GOOD, "shared_prefix": {"id": "p", "tokens": 6}}), "shared_prefix.tokens: 6 is more"),
        (json.dumps({**GOOD, "shared_prefix": {"id": "", "tokens": 5}}), "shared_prefix.id"),
        (json.dumps({**GOOD, "shared_prefix": {"id": "p"}}), "shared_prefix.tokens is missing"),
        ("[" * 100_000, "nested too deeply"),
        ('{"session_id": ' + "[" * 100_000, "nested too deeply"),
        (f'{{"arrival_s": {"9" * 5000}}}', "too many digits"),
        (json.dumps({**GOOD, "rounds": [{**ROUND, "incr_tokens": 10**400}]}), "rounds.0.incr_tokens"),
        (json.dumps({**GOOD, "arrival_s": 10**400}), "arrival_s"),
        (json.dumps({**GOOD, "arrival_s": 1e300}), "arrival_s"),
        (json.dumps({**GOOD, "rounds": [ROUND, {**ROUND, "tool_s": 1e300}]}), "rounds.1.tool_s"),
        (json.dumps({**GOOD, "arrival_s": 0.5}).replace("0.5", "1e999"), "arrival_s"),
        (json.dumps(GOOD), "was used in line 1 already"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n")
    with pytest.raises(UserError, match=r"t\.jsonl:3: ") as caught:
        list(read_trace(path))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_byte_order_mark_and_lines_of_windows_are_read(tmp_path: Path, name: str) -> None:
    content = f"\ufeff{json.dumps(GOOD)}\r\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert [session.session_id for session in read_trace(tmp_path / name)] == [GOOD["session_id"]]


def test_context_just_kept_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({**GOOD, "rounds": [ROUND, {**ROUND, "keep_tokens": 7}]}))
    assert next(read_trace(path)).prompts_tokens() == [(0, 5), (7, 5)]


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match="holds no session"):
        load_trace(str(path))


def test_broken_files_are_one_line(tmp_path: Path) -> None:
    binary, cut = tmp_path / "b.jsonl", tmp_path / "c.jsonl.gz"
    binary.write_bytes(b"\xff\xfe\x00")
    cut.write_bytes(gzip.compress(json.dumps(GOOD).encode())[:-6])
    with pytest.raises(UserError, match="not UTF-8"):
        load_trace(str(binary))
    with pytest.raises(UserError, match="cannot be read to its end"):
        load_trace(str(cut))


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("workloads.trace._LINE_CHARACTERS", 1000)
    path, content = tmp_path / name, (json.dumps(GOOD) + "\n" + " " * 2000).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    with pytest.raises(UserError, match="a line has more than 1000 characters"):
        load_trace(str(path))


def test_a_small_file_that_unpacks_to_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workloads.trace.UNPACKED_CHARACTERS", 1000)
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(GOOD) + "\n" * 2000).encode()))
    with pytest.raises(UserError, match="unpacks to more than 1000 characters"):
        load_trace(str(path))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*GOOD, *ROUND]), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=60) | _JSON.map(lambda value: json.dumps(value).encode()))
def test_any_file_is_a_trace_or_the_users_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "t.jsonl"
    path.write_bytes(content)
    with suppress(UserError):
        list(read_trace(path))


def test_unknown_names_list_the_shipped_traces() -> None:
    with pytest.raises(UserError, match="tau-bench-airline"):
        load_trace("no-such-trace")


@pytest.mark.parametrize("name", sorted(shipped_traces()))
def test_shipped_traces_are_valid_and_small(name: str) -> None:
    traced = load_trace(name)
    assert len(traced) >= 10
    assert all(len(session.rounds) > 1 for session in traced)
    assert shipped_traces()[name].stat().st_size < 100_000
    assert [session.arrival_s for session in traced] == sorted(session.arrival_s for session in traced)


def test_dump_has_the_keys_of_the_format() -> None:
    row: dict[str, Any] = json.loads(dump_session(Session.model_validate(GOOD)))
    assert list(row) == ["session_id", "arrival_s", "rounds"]
    assert list(row["rounds"][0]) == ["incr_tokens", "output_tokens", "tool_s", "keep_tokens"]


@pytest.mark.slow
@given(st.lists(sessions(), min_size=1, max_size=6, unique_by=lambda session: session.session_id), st.integers(1, 8))
def test_a_limit_takes_the_sessions_that_arrive_first(
    tmp_path_factory: pytest.TempPathFactory, traced: list[Session], limit: int
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    write_trace(traced, path)
    assert load_trace(str(path), limit) == load_trace(str(path))[:limit]


def test_a_file_without_sessions_is_refused_also_as_a_stream(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no session"):
        list(stream_trace(str(tmp_path / "t.jsonl")))


def sharing(tokens: int, *rounds: dict[str, Any]) -> Session:
    prefix = {"id": "p", "tokens": tokens}
    return Session.model_validate({**GOOD, "rounds": rounds, "shared_prefix": prefix})


def test_what_is_shared_need_not_be_computed() -> None:
    later = {"incr_tokens": 3, "output_tokens": 2}
    session = sharing(80, {"incr_tokens": 100, "output_tokens": 10}, later, {**later, "keep_tokens": 50}, later)
    assert session.shared_tokens() == [80, 80, 50, 50]
    assert session.computed_tokens() == [(80, 20), (110, 3), (50, 3), (55, 3)]
    # The last token of a prompt is computed for its output.
    assert sharing(100, {"incr_tokens": 100, "output_tokens": 1}).computed_tokens() == [(99, 1)]
    plain = Session.model_validate(GOOD)
    assert plain.shared_tokens() == [0]
    assert plain.computed_tokens() == plain.prompts_tokens()
