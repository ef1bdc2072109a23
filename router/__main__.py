"""`python -m router`: one coordinator process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from ampd.call_signatures import check_closed
from ampd.child_process import exit_now
from ampd.connections import bound_silence
from ampd.errors import guarded
from ampd.model_folder import check_model_folder
from ampd.settings import parse_settings
from ampd.telemetry.logs import configure_logging
from ampd.telemetry.metrics import exposition
from router.model_card import ModelCard
from router.policies import CoordinatorPolicies
from router.settings import ACKNOWLEDGED_S, PROG, CoordinatorSettings

_ACKNOWLEDGEMENT_VARIABLE = "DYN_TCP_REQUEST_TIMEOUT"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(arguments))


def _run(argv: list[str]) -> int:
    settings = parse_settings(CoordinatorSettings, argv, PROG)
    card = ModelCard(settings, check_model_folder(settings.model, PROG))
    policies = CoordinatorPolicies.of(settings)
    check_closed(settings.graph_secret_file, PROG)

    exposition.prepare(PROG)
    os.environ.setdefault(_ACKNOWLEDGEMENT_VARIABLE, str(round(ACKNOWLEDGED_S)))

    # Imported late, so that --help and mistakes do not wait for these.
    import uvloop
    from dynamo.runtime import dynamo_worker

    from router.process import serve_coordinator

    configure_logging()
    bound_silence()

    @dynamo_worker()  # type: ignore[untyped-decorator]
    async def serve(runtime: Any) -> None:
        await serve_coordinator(runtime, settings, card, policies)

    uvloop.run(serve())
    return 0


if __name__ == "__main__":
    exit_now(main())
