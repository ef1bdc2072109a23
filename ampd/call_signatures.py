"""Calls between the processes of a graph, and their signatures, so that only members of the graph can make them.

A signature is an HMAC-SHA256 over the message, the endpoint, the worker that is called, the caller, the time and a
number that is used once. It travels beside the message, in the metadata of Dynamo's context. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any

from msgspec import msgpack

from ampd.errors import UserError

SIGNATURE = "ampd-signature"
"""The key of a signature in the metadata that travels with a call."""

RPC_HOST = "DYN_TCP_RPC_HOST"
"""The variable with the address on which Dynamo takes calls: by default an outer one of the machine."""

LOOPBACK: Mapping[str, str] = {
    RPC_HOST: "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "lo",  # Dynamo takes the name of an interface here
    "UCX_NET_DEVICES": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""Traffic between the processes of a graph on one machine stays on loopback: requests, answers, KV, collectives."""

MAX_AGE_S = 120.0
"""How much the clocks of two machines may differ, time on the way included."""

_BROKEN_CONNECTION = "Unavailable:"
"""Beginning of Dynamo's errors of a request that the worker has not acknowledged, because its connection broke."""

_MIN_CHARACTERS = 16
_SIGNATURE = re.compile(r"1 ([A-Za-z0-9-]{1,64}) (\d{1,12}) ([0-9a-f]{32}) ([0-9a-f]{64})")


class SignatureFault(StrEnum):
    """Why a call is refused."""

    MISSING = "missing"
    WRONG = "wrong"
    OLD = "old"
    REPEATED = "repeated"


def read_secrets(path: Path | None, prog: str) -> tuple[bytes, ...]:
    """The secrets of a file, one per line. Calls are signed with the first, and all are accepted. No file: none.

    Raises:
        UserError: the file cannot be read, or a secret in it is too short. No secret is shown.
    """
    if path is None:
        return ()
    try:
        lines = [line.strip() for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise UserError(f"{prog}: --graph-secret-file: cannot read {path} ({error.strerror})") from None
    found = tuple(line for line in lines if line)
    if not found or min(map(len, found)) < _MIN_CHARACTERS:
        raise UserError(
            f"{prog}: --graph-secret-file: {path} needs a secret of {_MIN_CHARACTERS} characters or more in each line; "
            f"make one: openssl rand -hex 32 > {path}"
        )
    return found


def secret_mark(secret: bytes) -> str:
    """A name of a secret that does not tell it. Workers publish those of the secrets that they accept."""
    return hmac.new(secret, b"mark", sha256).hexdigest()[:16]


def operator_token(secret: bytes) -> str:
    """What a request at a coordinator's system port must bring to see or end sessions.

    Every web page in a browser on the machine reaches the port, also under another name (DNS rebinding), and none knows
    the secret. The token tells nobody the secret.
    """
    return hmac.new(secret, b"sessions", sha256).hexdigest()


def check_closed(path: Path | None, prog: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Check that not everybody may call a member of a graph: it has a file of secrets, or it listens on loopback.

    Without secrets, variables of `LOOPBACK` that are not set are set, because their owners would take other interfaces.

    Raises:
        UserError: it has neither.
    """
    if path is not None:
        return
    host = environment.get(RPC_HOST, "")
    if not _is_local(host):
        where = f"{RPC_HOST}={host} is not" if host else f"without {RPC_HOST} it is not"
        raise UserError(
            f"{prog}: --graph-secret-file is missing: the members of a graph need it unless they listen on loopback, "
            f"and {where}, so that any process that reaches this one could read and end sessions; make a file for all "
            f"of them: openssl rand -hex 32 > FILE, or set {RPC_HOST}=127.0.0.1"
        )
    for variable, value in LOOPBACK.items():
        if not _is_local(given := environment.setdefault(variable, value)):
            raise UserError(
                f"{prog}: --graph-secret-file is missing: without it a member of a graph uses loopback only, and "
                f"{variable}={given} is not loopback; unset {variable}, or make a file for all members of the graph: "
                "openssl rand -hex 32 > FILE"
            )


def is_loopback_address(host: str) -> bool:
    """Whether this is an IP address of loopback; a name is none."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_local(host: str) -> bool:
    return host in ("localhost", "lo") or is_loopback_address(host)


class Signer:
    """Signs the calls of one process.

    Args:
        keys: the secrets that the processes share; without one, calls are not signed.
        caller: the name of this process, for the logs of the workers that it calls.
    """

    def __init__(self, keys: tuple[bytes, ...], caller: str, clock: Callable[[], float] = time.time) -> None:
        self._key = keys[0] if keys else None
        self._caller = caller
        self._clock = clock

    def sign(
        self, metadata: MutableMapping[str, str], endpoint: str, worker_id: str, message: Mapping[str, Any]
    ) -> None:
        """Put the signature of a call of a worker's endpoint into the call's metadata."""
        if self._key is None:
            return
        head = f"1 {self._caller} {int(self._clock())} {secrets.token_hex(16)}"
        metadata[SIGNATURE] = f"{head} {_mac(self._key, head, endpoint, worker_id, _canonical(message))}"


class Verifier:
    """Checks the signatures of the calls that reach one worker.

    Args:
        keys: the secrets that are accepted; without one, every call is.
    """

    def __init__(self, keys: tuple[bytes, ...], worker_id: str, clock: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._worker_id = worker_id
        self._clock = clock
        self._seen: set[str] = set()
        self._seen_before: set[str] = set()
        self._turned_s = clock()

    def refusal(self, metadata: Mapping[str, str], endpoint: str, message: Mapping[str, Any]) -> SignatureFault | None:
        """Why a call is refused; None: a member of the graph made it, for this worker, just now, for the first time."""
        if not self._keys:
            return None
        signature = metadata.get(SIGNATURE)
        if not signature:
            return SignatureFault.MISSING
        found = _SIGNATURE.fullmatch(signature)
        if found is None:
            return SignatureFault.WRONG
        head, mac = signature.rsplit(" ", 1)
        try:
            body = _canonical(message)
        except (TypeError, ValueError, OverflowError, RecursionError):
            return SignatureFault.WRONG  # not a message that a member of the graph sends
        if not any(hmac.compare_digest(mac, _mac(key, head, endpoint, self._worker_id, body)) for key in self._keys):
            return SignatureFault.WRONG
        now_s = self._clock()
        if abs(now_s - int(found[2])) > MAX_AGE_S:
            return SignatureFault.OLD
        return None if self._is_first(found[3], now_s) else SignatureFault.REPEATED

    def _is_first(self, nonce: str, now_s: float) -> bool:
        """Whether a number is used for the first time. What is older than any accepted call is forgotten."""
        if abs(now_s - self._turned_s) > 2 * MAX_AGE_S:
            self._seen, self._seen_before, self._turned_s = set(), self._seen, now_s
        if nonce in self._seen or nonce in self._seen_before:
            return False
        self._seen.add(nonce)
        return True


def claimed_caller(metadata: Mapping[str, str]) -> str:
    """The process that made a call, as the signature names it. It may be untrue. Empty: there is no signature."""
    found = _SIGNATURE.fullmatch(metadata.get(SIGNATURE) or "")
    return found[1] if found else ""


def _mac(key: bytes, head: str, endpoint: str, worker_id: str, body: bytes) -> str:
    mac = hmac.new(key, f"{head}\n{endpoint}\n{worker_id}\n".encode(), sha256)
    mac.update(body)
    return mac.hexdigest()


def _canonical(message: Mapping[str, Any]) -> bytes:
    """A message as bytes, equal for equal messages."""
    return msgpack.encode(message, order="deterministic")


async def call_worker(
    client: Any, signer: Signer, endpoint: str, worker_id: str, request: Mapping[str, Any], context: Any
) -> AsyncIterator[Any]:
    """Start a call; returns the stream of its answers.

    A network that forgets connections resets them while the worker lives. The second try makes a new connection,
    because Dynamo has dropped the broken one.

    Args:
        client: Dynamo's client of the endpoint.
    """

    async def start() -> AsyncIterator[Any]:
        signer.sign(context.metadata, endpoint, worker_id, request)
        stream: AsyncIterator[Any] = await client.direct(request, int(worker_id, 16), annotated=False, context=context)
        return stream

    try:
        return await start()
    except Exception as error:
        if not str(error).startswith(_BROKEN_CONNECTION):
            raise
    return await start()
