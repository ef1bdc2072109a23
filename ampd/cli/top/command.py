"""The body of `ampd top`."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Sequence

from ampd.cli.top.collect import PROG, Collector, Target, find_target
from ampd.cli.top.settings import TopSettings
from ampd.errors import RunError, UserError
from ampd.settings import parse_settings
from ampd.state.store import StateUnavailableError


def run(argv: Sequence[str]) -> int:
    """Show a running graph until q, Ctrl-C or SIGTERM, or once; 0.

    Raises:
        UserError: a wrong call, or a shared state that does not answer.
        RunError: with `--once`, no worker and no coordinator is alive.
    """
    settings = parse_settings(TopSettings, argv, PROG)
    target = find_target(settings)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars and ellipses in a terminal that knows only ASCII
    asyncio.run(_run(settings, target))
    return 0


async def _run(settings: TopSettings, target: Target) -> None:
    from ampd.cli.top.watch import print_each, print_snapshot, show_each, stopping_signals

    collector = await Collector.connect(target)
    try:
        try:
            first = await collector.read()
        except StateUnavailableError as error:
            raise UserError(f"{PROG}: {error}; the rights that `ampd top` needs are in docs/state.md") from None
        if settings.once:
            if not first["workers"] and not first["coordinators"]:
                raise RunError(
                    f"{PROG}: no worker and no coordinator is alive in namespace {target.namespace!r} of "
                    f"{target.place}; is the graph running, and is this its --namespace?"
                )
            print_snapshot(first, as_json=settings.as_json, indent=1)
            return
        with stopping_signals() as stopped:
            if settings.as_json or not sys.stdout.isatty():
                await print_each(collector.read, settings.interval_s, stopped, as_json=settings.as_json)
            else:
                await show_each(collector.read, settings.interval_s, stopped)
    finally:
        await collector.close()
