"""The body of `ampd top`."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Sequence

from ampd.cli.top.collect import PROG, Collector, Target, find_target
from ampd.cli.top.settings import TopSettings
from ampd.cli.top.snapshot import Snapshot
from ampd.errors import RunError, UserError
from ampd.settings import parse_settings
from ampd.state.store import StateUnavailableError


def run(argv: Sequence[str]) -> int:
    """Show a running graph until q, Ctrl-C or SIGTERM, or once; 0.

    Raises:
        UserError: a wrong call, or a shared state that does not answer.
        RunError: with `--once`, nobody is alive there.
    """
    settings = parse_settings(TopSettings, argv, PROG)
    target = find_target(settings)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars and ellipses, where a terminal knows only ASCII
    return asyncio.run(_run(settings, target))


async def _run(settings: TopSettings, target: Target) -> int:
    collector = await Collector.connect(target)
    try:
        first = await _first(collector)
        if settings.once:
            _print(_somebody(first, target), as_json=settings.as_json)
            return 0
        await _watch(settings, collector)
        return 0
    finally:
        await collector.close()


async def _first(collector: Collector) -> Snapshot:
    try:
        return await collector.read()
    except StateUnavailableError as error:
        raise UserError(f"{PROG}: {error}; the rights that a user needs to look on are in docs/state.md") from None


def _somebody(snapshot: Snapshot, target: Target) -> Snapshot:
    if snapshot.is_empty:
        raise RunError(
            f"{PROG}: nobody is alive in namespace {target.namespace!r} of {snapshot.state}; is the graph running, and "
            "is this its --namespace?"
        )
    return snapshot


def _print(snapshot: Snapshot, *, as_json: bool) -> None:
    from ampd.cli.top.render import as_text
    from ampd.cli.top.watch import plain_width

    if as_json:
        print(json.dumps(snapshot.as_dict(), indent=1), flush=True)
    else:
        print(as_text(snapshot, plain_width(), colours=sys.stdout.isatty()), end="", flush=True)


async def _watch(settings: TopSettings, collector: Collector) -> None:
    from ampd.cli.top.watch import print_each, show_each, stopping_signals

    with stopping_signals() as stopped:
        if settings.as_json or not sys.stdout.isatty():
            await print_each(collector.read, settings.interval_s, stopped, as_json=settings.as_json)
        else:
            await show_each(collector.read, settings.interval_s, stopped)
