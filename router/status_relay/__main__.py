"""`python -m router.status_relay`: Dynamo's frontend with a relay before it, and the flags of `dynamo.frontend`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence

from ampd.child_process import tied_to_parent
from ampd.errors import UserError, guarded
from ampd.process_exit import exit_now
from ampd.telemetry.logs import configure_logging

PROG = "python -m router.status_relay"
_LOOPBACK = "127.0.0.1"
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
    for flag, variable in _TLS.items():
        parser.add_argument(flag, default=os.environ.get(variable), help="not supported: end TLS before the relay")
    options, rest = parser.parse_known_args(argv)
    if options.tls_cert_path or options.tls_key_path:
        raise UserError(f"{PROG}: the relay has no TLS; leave out {' and '.join(_TLS)}, and end TLS before it")
    import uvloop

    configure_logging()
    code: int = uvloop.run(_serve(options.http_host, options.http_port, rest))
    return code


async def _serve(host: str, port: int, frontend_flags: Sequence[str]) -> int:
    """Run both. Returns the exit code of the frontend."""
    from aiohttp import web

    from router.status_relay.relay import Relay

    inner_port = _free_port()
    flags = ["--http-host", _LOOPBACK, "--http-port", str(inner_port), *frontend_flags]
    frontend = await asyncio.create_subprocess_exec(
        *tied_to_parent([sys.executable, "-m", "dynamo.frontend", *flags]), start_new_session=True
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, frontend.terminate)
    runner = Relay(f"http://{_LOOPBACK}:{inner_port}").runner()
    try:
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        return await frontend.wait()
    except OSError as error:
        raise UserError(
            f"{PROG}: cannot listen on {host}:{port} ({error.strerror}); choose another --http-port"
        ) from None
    finally:
        if frontend.returncode is None:
            frontend.terminate()
            await frontend.wait()
        await runner.cleanup()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    exit_now(main())
