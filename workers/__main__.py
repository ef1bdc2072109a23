"""`python -m workers`: one worker process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from ampd.call_signatures import check_closed
from ampd.child_process import exit_now
from ampd.connections import bound_silence
from ampd.errors import guarded
from ampd.settings import parse_settings
from ampd.telemetry.logs import configure_logging
from ampd.telemetry.metrics import exposition
from workers.settings import PROG, chosen_engine


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker until SIGTERM.

    Returns:
        0 ended as asked, 1 the engine or the shared state failed, 2 the call was wrong or no Redis answers at its URL
        (one line on stderr).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    from workers.engines import check_engine, settings_model

    settings = parse_settings(settings_model(chosen_engine(arguments)), arguments, PROG)
    check_closed(settings.graph_secret_file, PROG)
    check_engine(settings, PROG)

    exposition.prepare(PROG)

    # Imported late, so that --help and mistakes do not wait for these.
    import uvloop
    from dynamo.runtime import DistributedRuntime, dynamo_worker

    from workers.component import serve_worker

    configure_logging()
    bound_silence()
    logging.getLogger("asyncio").setLevel(logging.WARNING)

    async def worker(runtime: DistributedRuntime) -> None:
        await serve_worker(runtime, settings)

    uvloop.run(dynamo_worker()(worker)())
    return 0


if __name__ == "__main__":
    exit_now(main())
