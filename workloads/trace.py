"""The trace format: agent sessions as token counts and times, one JSON object per line."""

from __future__ import annotations

import gzip
import heapq
import json
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import IO, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ampd.documents import first_problem, replacing
from ampd.errors import UserError, did_you_mean

SHIPPED_SUFFIX = ".jsonl"

MAX_TOKENS = 2**31 - 1
"""Largest count of tokens in a round."""
MAX_TIME_S = 1e12
"""Latest time. Larger ones, such as 1e300, swallow everything that is added to them."""

_LINE_CHARACTERS = 64 << 20
UNPACKED_CHARACTERS = 1 << 30
"""Most that a packed file may unpack to, because a small file can fill the memory."""

_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"PAR1": ".parquet"}


class Round(BaseModel):
    """One prefill and the decode after it.

    Attributes:
        incr_tokens: new tokens of the prompt, behind the kept context.
        output_tokens: tokens that the model generates.
        tool_s: seconds between the end of the previous round and this one; 0 in the first.
        keep_tokens: tokens of the previous context (prompt and output) that are a prefix of this prompt; None: all.
        text: the words of the increment, for replays with real words.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    incr_tokens: int = Field(ge=1, le=MAX_TOKENS, strict=True)
    output_tokens: int = Field(ge=1, le=MAX_TOKENS, strict=True)
    tool_s: float = Field(default=0.0, ge=0, le=MAX_TIME_S, allow_inf_nan=False)
    keep_tokens: int | None = Field(default=None, ge=0, strict=True)
    text: str | None = None


class SharedPrefix(BaseModel):
    """The beginning of a session's first prompt that other sessions begin with too, such as a system prompt.

    Attributes:
        id: names it. Sessions with the same id share its tokens, or the first of them if theirs is shorter.
        tokens: of the first prompt, of which it is a part.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1)
    tokens: int = Field(ge=1, le=MAX_TOKENS, strict=True)


class Session(BaseModel):
    """One agent run: a chain of rounds that share one context.

    Attributes:
        arrival_s: when the first round is sent, in seconds from the start of the trace.
        shared_prefix: None: it shares nothing with other sessions, as far as is known.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    session_id: str = Field(min_length=1)
    arrival_s: float = Field(ge=0, le=MAX_TIME_S, allow_inf_nan=False)
    rounds: tuple[Round, ...] = Field(min_length=1)
    shared_prefix: SharedPrefix | None = None

    @model_validator(mode="after")
    def _chain_fits(self) -> Self:
        first = self.rounds[0]
        if first.tool_s != 0:
            raise ValueError(f"rounds.0.tool_s: the first round follows no tool, it must be 0 (given: {first.tool_s})")
        if self.shared_prefix is not None and self.shared_prefix.tokens > first.incr_tokens:
            raise ValueError(
                f"shared_prefix.tokens: {self.shared_prefix.tokens} is more than the first prompt has "
                f"({first.incr_tokens} tokens)"
            )
        context_tokens = 0
        for index, item in enumerate(self.rounds):
            if item.keep_tokens is not None and item.keep_tokens > context_tokens:
                raise ValueError(
                    f"rounds.{index}.keep_tokens: {item.keep_tokens} is more than the context before it "
                    f"({context_tokens} tokens)"
                )
            context_tokens = kept_tokens(item, context_tokens) + item.incr_tokens + item.output_tokens
        return self

    def prompts_tokens(self) -> list[tuple[int, int]]:
        """(history, increment) tokens of every round's prompt; their sum is the prompt's length."""
        pairs: list[tuple[int, int]] = []
        context_tokens = 0
        for item in self.rounds:
            kept = kept_tokens(item, context_tokens)
            pairs.append((kept, item.incr_tokens))
            context_tokens = kept + item.incr_tokens + item.output_tokens
        return pairs

    def shared_tokens(self) -> list[int]:
        """How much of each round's prompt other sessions begin with too. A rewritten context may keep less of it."""
        left = self.shared_prefix.tokens if self.shared_prefix is not None else 0
        shared: list[int] = []
        for index, (history, _) in enumerate(self.prompts_tokens()):
            left = min(left, history) if index else left
            shared.append(left)
        return shared

    def computed_tokens(self) -> list[tuple[int, int]]:
        """As `prompts_tokens`, where the shared prefix is history too, because it is computed for all sessions once.

        At least one token of a prompt is an increment.
        """
        pairs: list[tuple[int, int]] = []
        for (history, increment), shared in zip(self.prompts_tokens(), self.shared_tokens(), strict=True):
            there = max(history, min(shared, history + increment - 1))
            pairs.append((there, history + increment - there))
        return pairs

    @property
    def max_context_tokens(self) -> int:
        """The longest prompt with its output. The model's context window must hold it."""
        return max(
            history + increment + item.output_tokens
            for (history, increment), item in zip(self.prompts_tokens(), self.rounds, strict=True)
        )


def kept_tokens(item: Round, context_tokens: int) -> int:
    """Tokens of a context of `context_tokens` that stay valid in this round."""
    return context_tokens if item.keep_tokens is None else item.keep_tokens


def read_trace(path: Path) -> Iterator[Session]:
    """Stream the sessions of a trace file (`.gz` is unpacked), in the file's order.

    Raises:
        UserError: a malformed line, with file and line number, or an unreadable file.
    """
    seen: dict[str, int] = {}
    for number, line in numbered_lines(path):
        session = _parse_line(line, f"{path}:{number}")
        if session.session_id in seen:
            first = seen[session.session_id]
            raise UserError(f"{path}:{number}: session_id {session.session_id!r} was used in line {first} already")
        seen[session.session_id] = number
        yield session


def write_trace(sessions: Iterable[Session], path: Path) -> int:
    """Write sessions, one per line, and return their number. The file appears only when it is complete.

    Raises:
        UserError: the folder is missing or may not be written.
    """
    count = 0
    try:
        with replacing(path) as partial, _open_for_writing(partial, gzipped=path.suffix == ".gz") as out:
            for session in sessions:
                out.write(dump_session(session) + "\n")
                count += 1
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
    return count


def dump_session(session: Session) -> str:
    """One session as one line of JSON, without unused optional keys."""
    rounds = [item.model_dump(exclude={"text"} if item.text is None else None) for item in session.rounds]
    exclude = {"rounds", "shared_prefix"} if session.shared_prefix is None else {"rounds"}
    return json.dumps(session.model_dump(exclude=exclude) | {"rounds": rounds}, ensure_ascii=False)


def load_trace(name_or_path: str, limit: int | None = None) -> list[Session]:
    """The sessions of a trace by file path or by the name of a shipped trace, in order of arrival.

    Args:
        limit: only this number of sessions, those that arrive first. Memory is used for no others.

    Raises:
        UserError: no such file or name (the shipped ones are listed), a malformed line, or a file without sessions.
    """

    def arrival_s(session: Session) -> float:
        return session.arrival_s

    sessions = stream_trace(name_or_path)
    return sorted(sessions, key=arrival_s) if limit is None else heapq.nsmallest(limit, sessions, key=arrival_s)


def stream_trace(name_or_path: str) -> Iterator[Session]:
    """The sessions of a trace by file path or by the name of a shipped trace, in the order of the file.

    Raises:
        UserError: as `load_trace`.
    """
    path = find_trace(name_or_path)
    sessions = read_trace(path)
    if (first := next(sessions, None)) is None:
        raise UserError(f"{path}: holds no session")
    yield first
    yield from sessions


def find_trace(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(f"{name_or_path}: is a folder; a trace is one JSONL file (ampd trace convert makes one)")
    shipped = shipped_traces()
    if name_or_path in shipped:
        return shipped[name_or_path]
    known = ", ".join(sorted(shipped)) + did_you_mean(name_or_path, shipped)
    raise UserError(f"{name_or_path}: no such trace file, nor a shipped trace; shipped: {known}")


def shipped_traces() -> dict[str, Path]:
    """Name -> file of the traces that come with the project."""
    folder = Path(str(files("workloads").joinpath("traces")))
    return {path.name.removesuffix(SHIPPED_SUFFIX): path for path in sorted(folder.glob(f"*{SHIPPED_SUFFIX}"))}


def open_text(path: Path) -> IO[str]:
    """Open a UTF-8 text file for reading, unpacked if gzip or zstd packed it. A byte order mark is left out.

    Raises:
        UserError: it does not exist or may not be read, or the package that unpacks it is missing.
    """
    packing = packing_of(path)
    try:
        if packing == ".gz":
            return gzip.open(path, "rt", encoding="utf-8-sig")
        if packing == ".zst":
            unpacked: IO[str] = optional_package("zstandard", path).open(path, "rt", encoding="utf-8-sig")
            return unpacked
        return path.open(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None


def packing_of(path: Path) -> str:
    """How a file is packed, by its first bytes: `.gz`, `.zst`, `.parquet`, or not at all.

    Raises:
        UserError: it does not exist or may not be read.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(4)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    return next((suffix for magic, suffix in _MAGIC.items() if head.startswith(magic)), "")


def optional_package(name: str, path: Path) -> Any:
    """A package that only this file needs.

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise UserError(f"{path}: this file needs the package {package} (pip install {package})") from None


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file that are not blank, with their numbers.

    Raises:
        UserError: the file cannot be read, a line is longer than 64 Mi characters, or it unpacks to more than 1 Gi.
    """
    with open_text(path) as stream:
        for number, line in enumerate(_decoded(stream, path), start=1):
            if line.strip():
                yield number, line


def parse_json(text: str, where: str) -> Any:
    """One value from a text that a user wrote.

    Raises:
        UserError: it is not JSON, or nested too deeply, or has a number with too many digits.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise UserError(f"{where}: not usable (its brackets are nested too deeply)") from None
    except ValueError:
        raise UserError(f"{where}: not usable (a number has too many digits)") from None


def beginning_of(path: Path, characters: int) -> str:
    """The first characters of a text file.

    Raises:
        UserError: it cannot be read.
    """
    with open_text(path) as stream, _errors_named(path):
        return stream.read(characters)


def _decoded(stream: IO[str], path: Path) -> Iterator[str]:
    unpacked, packing = 0, packing_of(path)
    with _errors_named(path):
        while line := stream.readline(_LINE_CHARACTERS + 1):
            unpacked += len(line)
            if len(line) > _LINE_CHARACTERS:
                raise UserError(f"{path}: a line has more than {_LINE_CHARACTERS} characters; is it a trace?")
            if packing and unpacked > UNPACKED_CHARACTERS:
                raise UserError(
                    f"{path}: unpacks to more than {UNPACKED_CHARACTERS} characters; if it is meant to, unpack it first"
                )
            yield line


@contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read to its end ({error})") from None
    except Exception as error:
        if type(error).__name__ != "ZstdError":  # its package is there only if a file needed it
            raise
        raise UserError(f"{path}: cannot be read to its end ({error})") from None


def _parse_line(line: str, where: str) -> Session:
    with suppress(ValidationError):
        return Session.model_validate_json(line)
    # Once more, slowly, for a message that names the place.
    raw = parse_json(line, where)
    if not isinstance(raw, dict):
        raise UserError(f"{where}: a session is a JSON object, this is a {type(raw).__name__}")
    if "rounds" not in raw:
        raise UserError(f"{where}: a session has rounds, this row has none; ampd trace convert reads other formats")
    try:
        return Session.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{where}: {first_problem(error)}") from None


def _open_for_writing(path: Path, *, gzipped: bool) -> IO[str]:
    return gzip.open(path, "wt", encoding="utf-8") if gzipped else path.open("w", encoding="utf-8")


# -- new arrivals for a trace: a Poisson process of a given rate


def retime(sessions: Sequence[Session], rate: float | None, seed: int, limit: int | None) -> list[Session]:
    """Replace the arrivals by a Poisson process of `rate` sessions per second, and take `limit` sessions.

    With a rate, the sessions are repeated under new names until the limit is reached. Without a rate the trace's own
    arrivals stay, shifted so that the first session arrives at 0, and the limit only cuts. The same seed gives the
    same arrivals.

    Raises:
        UserError: a rate or limit that is not positive.
    """
    if rate is not None and not 0 < rate < float("inf"):
        raise UserError(f"--rate must be a positive number of sessions per second (given: {rate})")
    if limit is not None and limit < 1:
        raise UserError(f"--limit must be at least 1 (given: {limit})")
    if not sessions:
        return []
    if rate is None:
        return _shifted(sorted(sessions, key=lambda session: session.arrival_s)[:limit])
    wanted = len(sessions) if limit is None else limit
    arrivals = poisson_arrivals(wanted, rate, random.Random(seed))
    return [_repeated(sessions, index, arrival_s) for index, arrival_s in enumerate(arrivals)]


def poisson_arrivals(count: int, rate: float, rng: random.Random) -> list[float]:
    """`count` arrival times in seconds, the first at 0, with exponential gaps of mean 1 / `rate`."""
    arrivals: list[float] = []
    now_s = 0.0
    for _ in range(count):
        arrivals.append(now_s)
        now_s += rng.expovariate(rate)
    return arrivals


def _shifted(sessions: Sequence[Session]) -> list[Session]:
    start_s = sessions[0].arrival_s
    return [session.model_copy(update={"arrival_s": session.arrival_s - start_s}) for session in sessions]


def _repeated(sessions: Sequence[Session], index: int, arrival_s: float) -> Session:
    lap, position = divmod(index, len(sessions))
    session = sessions[position]
    name = session.session_id if lap == 0 else f"{session.session_id}#{lap + 1}"
    return session.model_copy(update={"session_id": name, "arrival_s": arrival_s})
