"""The client of a replay: streams of OpenAI endpoints with the time of every chunk, and the prompts of a session."""

from __future__ import annotations

import json
import random
import re
import socket
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import httpx

from ampd.errors import RunError, UserError, without_credentials
from workloads.trace import Round

CONNECT_TIMEOUT_S = 4.0
"""A URL that does not answer must be reported within 5 s."""

_HEADER_WORD = re.compile(r"[!-~]+")
_DYNAMO_OWNER = "nvidia"
_TOKEN_IDS_FIELD = "completion_token_ids"
_DECISION_FIELD = "engine_data"
_NOT_UNDERSTOOD = (400, 404, 405, 415, 422, 501)


class RequestError(Exception):
    """One request failed, with a message for users. `status` is the HTTP status, if there was one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Dialect:
    """Which request fields an endpoint understands.

    Attributes:
        path: `completions` or `chat/completions`.
        token_ids: prompts are token ids, and the stream returns the ids of the output.
        nvext: Dynamo's extensions (output token ids, decision records, the SLO of a request).
        return_token_ids: vLLM's flag that returns the ids of the output.
        ignore_eos: the request can force the length of the output.
        completion_limit: the length limit has OpenAI's newer name.
    """

    path: str
    token_ids: bool = False
    nvext: bool = False
    return_token_ids: bool = False
    ignore_eos: bool = False
    completion_limit: bool = False

    def __str__(self) -> str:
        words = ["token ids" if self.token_ids else "words"]
        words += [name for name, on in (("nvext", self.nvext), ("ignore_eos", self.ignore_eos)) if on]
        return f"{self.path} ({', '.join(words)})"

    def body(self, model: str, output_tokens: int, router: Mapping[str, float] | None) -> dict[str, Any]:
        """The request's fields without the prompt; `router` is Dynamo's per-request SLO, in milliseconds."""
        limit = "max_completion_tokens" if self.completion_limit else "max_tokens"
        body: dict[str, Any] = {"model": model, "stream": True, limit: output_tokens, "temperature": 0}
        body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body |= {"ignore_eos": True, "min_tokens": output_tokens}
        if self.return_token_ids:
            body["return_token_ids"] = True
        if self.nvext:
            body["nvext"] = {"extra_fields": [_TOKEN_IDS_FIELD, _DECISION_FIELD]}
            if router:
                body["nvext"]["router"] = dict(router)
                # For completions Dynamo's frontend drops these fields, but keeps annotations.
                body["nvext"]["annotations"] = [f"{name}:{value}" for name, value in router.items()]
        return body


@dataclass(slots=True)
class Chunk:
    """One event of a stream, with tokens or a report.

    Attributes:
        at_s: time of its arrival, on the clock of `time.perf_counter`.
        token_ids: None if the endpoint does not return them.
    """

    at_s: float
    text: str = ""
    token_ids: list[int] | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    engine_data: Mapping[str, Any] = field(default_factory=dict)


class Endpoint:
    """An OpenAI endpoint. Every request opens a new connection.

    A kept-alive connection would add up to 40 ms to the end of a stream (Nagle's algorithm against delayed ACKs).
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise UserError(f"--url {url}: must begin with http:// or https://")
        try:
            httpx.URL(base)
        except httpx.InvalidURL as error:
            raise UserError(f"--url {url}: {error}") from None
        if api_key and not _HEADER_WORD.fullmatch(api_key):
            raise UserError("AMPD_API_KEY: has a space, a line break or a letter that a header cannot have")
        self.base = without_credentials(base)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(
            base_url=f"{base}/v1/",
            trust_env=False,  # a proxy would count as the server's latency
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                socket_options=[(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)],
            ),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def choose_model(self, wanted: str | None) -> tuple[str, bool]:
        """(model to ask for, whether a Dynamo frontend answers).

        Raises:
            UserError: nothing answers at the URL, or the wanted model is not served there.
            RunError: it answers, but serves no model.
        """
        try:
            response = await self._client.get("models", timeout=CONNECT_TIMEOUT_S)
            models = response.raise_for_status().json()["data"]
            names = [str(model["id"]) for model in models]
        except httpx.HTTPStatusError as error:
            if wanted:
                return wanted, False
            status = error.response.status_code
            raise UserError(f"{self.base}/v1/models answers HTTP {status}; give the model by --model") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise UserError(f"{self.base} does not answer ({why}); is it running, and is --url right?") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{self.base}/v1/models is not an OpenAI model list; is --url right?") from None
        dynamo = any(model.get("owned_by") == _DYNAMO_OWNER for model in models)
        if not names:
            raise RunError(f"{self.base} serves no model yet")
        if wanted and wanted not in names:
            raise UserError(f"--model {wanted}: not served at {self.base}; served: {', '.join(names)}")
        return wanted or names[0], dynamo

    async def negotiate(self, model: str, api: str, nvext: bool, prompts: Mapping[str, Any]) -> Dialect:
        """The richest dialect that the endpoint understands, found by requests for two tokens.

        `api`: `chat`; `completions`, with token ids if they come back, else with words; `words`: completions with
        words; `auto`: token ids if they come back, else chat, else words.
        `prompts`: `ids`, `text` and `messages`, each a short prompt.

        Raises:
            RunError: the endpoint understands none, or it fails.
        """
        refusal: RequestError | None = None
        for dialect in _dialects(api, nvext):
            fields = _short_prompt(dialect, prompts)
            try:
                chunks = [chunk async for chunk in self.stream(dialect, dialect.body(model, 2, None) | fields, {})]
            except RequestError as error:
                if error.status not in _NOT_UNDERSTOOD:
                    raise RunError(f"{self.base}: {error}") from None
                refusal = error
                continue
            if not dialect.token_ids or any(chunk.token_ids for chunk in chunks):
                return dialect
        raise RunError(f"{self.base}: does not understand {api} requests ({refusal or 'it returns no token ids'})")

    async def stream(
        self, dialect: Dialect, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[Chunk]:
        """Send one request and yield the chunks of its stream.

        Raises:
            RequestError: no connection, an HTTP error, an error event in the stream, or a broken stream.
        """
        content = json.dumps(body).encode()
        sent = {"content-type": "application/json", **headers}
        try:
            async with self._client.stream("POST", dialect.path, content=content, headers=sent) as response:
                if response.status_code != httpx.codes.OK:
                    raise RequestError(_error_message(await response.aread()), response.status_code)
                async for chunk in _events(response.aiter_lines()):
                    yield chunk
        except httpx.TimeoutException as error:
            raise RequestError(f"timed out ({type(error).__name__})") from None
        except httpx.HTTPError as error:
            raise RequestError(str(error) or type(error).__name__) from None


def _dialects(api: str, nvext: bool) -> list[Dialect]:
    ids = Dialect("completions", token_ids=True, ignore_eos=True)
    chat = [
        *([Dialect("chat/completions", nvext=True, ignore_eos=True)] if nvext else []),
        Dialect("chat/completions", ignore_eos=True),
        Dialect("chat/completions"),
        Dialect("chat/completions", completion_limit=True),
    ]
    if api == "chat":
        return chat
    exact = [replace(ids, nvext=True)] if nvext else []
    exact.append(replace(ids, return_token_ids=True))
    words = [Dialect("completions", ignore_eos=True), Dialect("completions")]
    if nvext:
        words.insert(0, Dialect("completions", nvext=True, ignore_eos=True))
    if api == "words":
        return words
    return [*exact, *words] if api == "completions" else [*exact, *chat, *words]


def _short_prompt(dialect: Dialect, prompts: Mapping[str, Any]) -> dict[str, Any]:
    if dialect.path == "chat/completions":
        return {"messages": prompts["messages"]}
    return {"prompt": prompts["ids" if dialect.token_ids else "text"]}


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[Chunk]:
    """Parse server-sent events; the stream must end with `[DONE]` or by the server's own end after a finish."""
    failing = False
    async for line in lines:
        now_s = time.perf_counter()
        if line.startswith("event:"):
            failing = line.removeprefix("event:").strip() == "error"
        elif failing and line.startswith((":", "data:")):
            raise RequestError(_error_message(line.partition(":")[2].strip().encode()))
        elif line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            yield _chunk(data, now_s)


def _chunk(data: str, now_s: float) -> Chunk:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        raise RequestError(f"the stream holds no JSON: {data[:80]}") from None
    if not isinstance(event, dict) or event.get("error"):
        raise RequestError(_error_message(data.encode()))
    try:
        return _chunk_of(event, now_s)
    except (AttributeError, TypeError, ValueError):
        raise RequestError(f"the stream holds an event of an unknown form: {data[:80]}") from None


def _chunk_of(event: Mapping[str, Any], now_s: float) -> Chunk:
    """An event as a chunk. A value of a wrong type in it raises AttributeError, TypeError or ValueError."""
    chunk = Chunk(at_s=now_s, usage=_usage(event.get("usage")))
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        parts = (choice.get("text"), delta.get("content"), delta.get("reasoning_content"), _tool_words(delta))
        chunk.text += "".join(part for part in parts if part)
        if choice.get("token_ids") is not None:
            chunk.token_ids = _whole_numbers(choice["token_ids"])
    extensions = event.get("nvext") or {}
    if _TOKEN_IDS_FIELD in extensions:
        chunk.token_ids = _whole_numbers(extensions[_TOKEN_IDS_FIELD] or [])
    chunk.engine_data = dict(extensions.get(_DECISION_FIELD) or {})
    if not isinstance(chunk.engine_data.get("ampd"), dict | None):
        raise TypeError("not a record of a decision")
    return chunk


def _usage(value: Any) -> dict[str, Any]:
    """A report of tokens without what is null."""
    usage = {name: count for name, count in dict(value or {}).items() if count is not None}
    cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    _whole_numbers([count for count in (usage.get("prompt_tokens"), cached_tokens) if count is not None])
    return usage


def _whole_numbers(values: Any) -> list[int]:
    if type(values) is not list or any(type(value) is not int for value in values):
        raise TypeError("not a list of whole numbers")
    return values


def _tool_words(delta: Mapping[str, Any]) -> str:
    calls = delta.get("tool_calls") or ()
    return "".join(str((call.get("function") or {}).get("arguments") or "") for call in calls)


def _error_message(raw: bytes) -> str:
    """The message inside the error formats in use, else the start of the body."""
    text = raw.decode(errors="replace").strip()
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return text[:200] or "no message"
    if isinstance(content, dict):
        inner = content.get("error", content)
        message = inner.get("message") if isinstance(inner, dict) else inner
        return str(message or text)[:200]
    return str(content)[:200]


# -- What a session's next prompt is made of: the context that the server really produced, cut and extended

# -- deterministic prompts of a given length, for traces that have token counts but no words

_COMMON = (
    "the of and to in is that for it with as was on be at by this from are or an but not which all one "
    "you have had they we can will more when who about out up said what its time than into only other new some could "
    "these two may then do first any my now such like our over man me even most made after also did many before must"
)

WORDS = tuple(_COMMON.split())
"""Short common words: with the space before it each is one token in the BPE vocabularies in use today."""


def synthetic_words(count: int, seed: str) -> str:
    """`count` words, each of one token, the same for the same seed."""
    return "".join(f" {word}" for word in random.Random(seed).choices(WORDS, k=count))


def synthetic_token_ids(count: int, seed: str, first: int, last: int) -> list[int]:
    """`count` token ids between `first` and `last`, both included, the same for the same seed."""
    rng = random.Random(seed)
    width = last - first + 1
    return [first + int(rng.random() * width) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Token ids, both included, that synthetic prompts are drawn from."""

    first: int
    last: int


SAFE_TOKENS = TokenRange(64, 250)
"""Plain byte tokens, never special ones, in the byte-level and SentencePiece vocabularies in use today."""


class History(Protocol):
    """The context of one session during a replay."""

    def prompt(self, item: Round, seed: str) -> dict[str, Any]:
        """Cut the context to what this round keeps, add the round's increment, and return the request's fields."""

    def answered(self, text: str, token_ids: list[int]) -> None:
        """Append what the server generated."""

    @property
    def length_tokens(self) -> int:
        """Length of the context; exact with token ids, else as the trace counts."""


@dataclass(frozen=True, slots=True)
class CommonStart:
    """The first tokens of a session's first prompt, which are the same for all sessions with this seed."""

    tokens: int
    seed: str


class TokenHistory:
    """A context of token ids: the next prompt is an exact extension of what the server computed and generated."""

    def __init__(self, tokens: TokenRange, start: CommonStart | None = None) -> None:
        self._range = tokens
        self._start = start
        self._ids: list[int] = []

    def prompt(self, item: Round, seed: str) -> dict[str, Any]:
        if item.keep_tokens is not None:
            del self._ids[item.keep_tokens :]
        own_tokens = item.incr_tokens
        if self._start is not None:
            self._ids += self._drawn(self._start.tokens, self._start.seed)
            own_tokens -= self._start.tokens
            self._start = None
        self._ids += self._drawn(own_tokens, seed)
        return {"prompt": list(self._ids)}

    def answered(self, text: str, token_ids: list[int]) -> None:
        del text
        self._ids += token_ids

    @property
    def length_tokens(self) -> int:
        """Exact."""
        return len(self._ids)

    def _drawn(self, tokens: int, seed: str) -> list[int]:
        return synthetic_token_ids(tokens, seed, self._range.first, self._range.last)


@dataclass(slots=True)
class _Piece:
    role: str
    text: str
    tokens: int


@dataclass(slots=True)
class WordHistory:
    """A context of words, as chat messages or as one text; a cut goes through a piece in proportion to its words.

    Attributes:
        start: becomes the system message. Real words of the trace have their own.
    """

    chat: bool
    start: CommonStart | None = None
    _pieces: list[_Piece] = field(default_factory=list)
    _expected_output_tokens: int = 0

    def prompt(self, item: Round, seed: str) -> dict[str, Any]:
        if item.keep_tokens is not None:
            self._cut(item.keep_tokens)
        own_tokens = item.incr_tokens
        if self.start is not None and item.text is None and self.start.tokens < own_tokens:
            common = synthetic_words(self.start.tokens, self.start.seed)
            self._pieces.append(_Piece("system", common, self.start.tokens))
            own_tokens -= self.start.tokens
        self.start = None
        words = item.text if item.text is not None else synthetic_words(own_tokens, seed)
        self._pieces.append(_Piece("user", words, own_tokens))
        self._expected_output_tokens = item.output_tokens
        if not self.chat:
            return {"prompt": "".join(piece.text for piece in self._pieces)}
        return {"messages": [{"role": piece.role, "content": piece.text} for piece in self._pieces]}

    def answered(self, text: str, token_ids: list[int]) -> None:
        del token_ids
        self._pieces.append(_Piece("assistant", text, self._expected_output_tokens))

    @property
    def length_tokens(self) -> int:
        """The sum of the trace's counts."""
        return sum(piece.tokens for piece in self._pieces)

    def _cut(self, keep_tokens: int) -> None:
        kept: list[_Piece] = []
        left = keep_tokens
        for piece in self._pieces:
            if left <= 0:
                break
            if piece.tokens > left:
                text = piece.text[: len(piece.text) * left // piece.tokens]
                # A cut through a word would make tokens that neither side has.
                space = text.rfind(" ")
                piece = _Piece(piece.role, text[:space] if space > 0 else text, left)
            kept.append(piece)
            left -= piece.tokens
        self._pieces = kept
