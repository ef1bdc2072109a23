"""`python -m router.status_relay`: Dynamo's frontend with a relay before it, and the flags of `dynamo.frontend`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence

from ampd.child_process import exit_now, reserved_ports, tied_to_parent
from ampd.errors import UserError, guarded
from ampd.telemetry.logs import configure_logging
from router.status_relay.sessions import Source, chosen_sources

PROG = "python -m router.status_relay"
_LOOPBACK = "127.0.0.1"
_FRONTEND = "dynamo.frontend"
_BACKLOG = 4096
"""Connections that wait to be accepted. Clients that come at once would else wait a second to connect again."""

_TLS = {"--tls-cert-path": "DYN_TLS_CERT_PATH", "--tls-key-path": "DYN_TLS_KEY_PATH"}
"""Flags and variables of `dynamo.frontend`, which would speak TLS with the relay only."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the frontend has ended, which SIGTERM and SIGINT ask it to do."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(arguments))


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__, allow_abbrev=False)
    parser.add_argument("--http-host", default=os.environ.get("DYN_HTTP_HOST", "0.0.0.0"), help="address to listen on")
    parser.add_argument("--http-port", type=int, default=os.environ.get("DYN_HTTP_PORT", "8000"))
    parser.add_argument("--session-names", default="", help="further headers and `body:` keys that name a session")
    parser.add_argument(
        "--model-alias",
        action="append",
        default=[],
        metavar="PATTERN=NAME",
        type=_alias,
        help="model names that clients may also use, with * for any text, and the name of the model; may be repeated",
    )
    for flag, variable in _TLS.items():
        parser.add_argument(flag, default=os.environ.get(variable), help="not supported: end TLS before the relay")
    options, rest = parser.parse_known_args(argv)
    if options.tls_cert_path or options.tls_key_path:
        raise UserError(
            f"{PROG}: the relay has no TLS; leave out {' and '.join(_TLS)} ({', '.join(_TLS.values())}) and end TLS "
            "before it, or leave out the relay (on Kubernetes: components/no-status-relay)"
        )
    import uvloop

    sources = chosen_sources(options.session_names, PROG)

    configure_logging()
    _allow_many_connections()
    code: int = uvloop.run(_serve(options.http_host, options.http_port, rest, options.model_alias, sources))
    return code


def _alias(text: str) -> tuple[str, str]:
    pattern, is_pair, name = text.partition("=")
    if not (pattern and is_pair and name):
        raise argparse.ArgumentTypeError(f"{text!r} is not PATTERN=NAME, as in claude-*=qwen3-32b")
    return pattern, name


def _allow_many_connections() -> None:
    """Each request takes two connections here. The frontend inherits the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(
    host: str,
    port: int,
    frontend_flags: Sequence[str],
    aliases: Sequence[tuple[str, str]],
    sources: Sequence[Source],
) -> int:
    """Run both. Returns the exit code of the frontend."""
    with reserved_ports(_LOOPBACK, 1) as (inner_port,):
        frontend = await _start(["--http-host", _LOOPBACK, "--http-port", str(inner_port), *frontend_flags])
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, _terminate, frontend)
        try:
            return await _relay_until_ended(frontend, f"http://{_LOOPBACK}:{inner_port}", host, port, aliases, sources)
        finally:
            _terminate(frontend)
            await frontend.wait()


async def _start(flags: Sequence[str]) -> asyncio.subprocess.Process:
    """Start the frontend. Without the relay nobody can reach it, so it is killed then, also if it is stopped."""
    argv = tied_to_parent([sys.executable, "-m", "ampd.connections", _FRONTEND, *flags], signal.SIGKILL)
    return await asyncio.create_subprocess_exec(*argv, start_new_session=True)


def _terminate(frontend: asyncio.subprocess.Process) -> None:
    if frontend.returncode is None:
        frontend.terminate()


async def _relay_until_ended(
    frontend: asyncio.subprocess.Process,
    upstream: str,
    host: str,
    port: int,
    aliases: Sequence[tuple[str, str]],
    sources: Sequence[Source],
) -> int:
    """Pass requests on while the frontend runs. Returns its exit code."""
    # Here, because the frontend starts meanwhile.
    from aiohttp import web

    from router.status_relay.relay import DYNAMOS_BODY_LIMIT_MB, HEALTH_PATH, Relay

    chosen = os.environ.get("DYN_HTTP_BODY_LIMIT_MB", "")
    limit_mb = int(chosen) if chosen.isdecimal() else DYNAMOS_BODY_LIMIT_MB
    health_path = os.environ.get("DYN_HTTP_SVC_HEALTH_PATH") or HEALTH_PATH
    runner = Relay(upstream, limit_mb << 20, health_path, aliases, sources).runner()
    try:
        await runner.setup()
        await web.TCPSite(runner, host, port, backlog=_BACKLOG).start()
        code = await frontend.wait()
    except OSError as error:
        raise UserError(
            f"{PROG}: cannot listen on {host}:{port} ({error.strerror}); choose another --http-port"
        ) from None
    finally:
        await runner.cleanup()
    if code < 0:
        logging.getLogger(__name__).error("%s was ended by a signal: %s", _FRONTEND, signal.strsignal(-code))
        return 128 - code
    return code


if __name__ == "__main__":
    exit_now(main())
