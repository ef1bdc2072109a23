"""`python -m router`: one coordinator process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ampd.errors import UserError, guarded
from ampd.model_folder import check_model_folder
from ampd.perf.model import PerformanceModel
from ampd.perf.piecewise import load_performance_model
from ampd.policies import registry
from ampd.policies.base import BindingPolicy, PoolsPolicy, RoutingPolicy
from ampd.policies.naming import parse_named
from ampd.settings import parse_settings
from ampd.state import open_store
from ampd.state.store import StateUnavailableError
from ampd.telemetry.logs import configure_logging
from ampd.telemetry.metrics import system
from ampd.telemetry.metrics.exposition import ProcessCollector, expose
from ampd.telemetry.metrics.names import Process
from ampd.wire import COORDINATOR_COMPONENT, COORDINATOR_ENDPOINT
from router.settings import PROG, CoordinatorSettings, context_length

log = logging.getLogger("router")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(arguments))


def _run(argv: list[str]) -> int:
    settings = parse_settings(CoordinatorSettings, argv, PROG)
    folder = check_model_folder(settings.model, PROG)
    card = _ModelCard(settings, folder)
    binding_params = _old_parameters("binding", settings.binding_params)
    binding = registry.create_named("binding", settings.binding, **binding_params)
    routing_params = _old_parameters("routing", settings.routing_params)
    routing = registry.create_named("routing", settings.routing, **routing_params)
    pools = registry.create_named("pools", settings.pools)
    model = load_performance_model(settings.perf)

    system.prepare(PROG)

    import uvloop
    from dynamo.runtime import dynamo_worker

    configure_logging()

    @dynamo_worker()  # type: ignore[untyped-decorator]
    async def serve(runtime: Any) -> None:
        await _serve(runtime, settings, card, binding, routing, pools, model)

    uvloop.run(serve())
    return 0


def _old_parameters(kind: str, text: str) -> dict[str, Any]:
    """The parameters that `--KIND-params` names, with a warning: this flag goes with the next version."""
    flag = f"--{kind}-params"
    _, parameters = parse_named(f"{flag}({text})")
    if parameters:
        print(f"{PROG}: {flag} goes with the next version; write --{kind} 'NAME({text})'", file=sys.stderr)
    return parameters


class _ModelCard:
    """What the frontend is told of the model, checked before anything starts."""

    def __init__(self, settings: CoordinatorSettings, folder: Path) -> None:
        from dynamo._core import get_reasoning_parser_names, get_tool_parser_names

        self.folder = folder
        self.name = settings.served_name
        self.context_length = context_length(folder, settings.context_length)
        self.tool_call_parser = _known("--dyn-tool-call-parser", settings.dyn_tool_call_parser, get_tool_parser_names())
        self.reasoning_parser = _known(
            "--dyn-reasoning-parser", settings.dyn_reasoning_parser, get_reasoning_parser_names()
        )
        self.template = _template(settings.custom_jinja_template)
        self.kv_block_size = settings.kv_block_size

    async def register(self, endpoint: Any) -> None:
        """Make the model known to the frontends."""
        from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model

        config = ModelRuntimeConfig()
        config.context_length = self.context_length
        config.tool_call_parser = self.tool_call_parser
        config.reasoning_parser = self.reasoning_parser
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            endpoint,
            str(self.folder),
            self.name,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=self.kv_block_size,
            runtime_config=config,
            custom_template_path=self.template,
        )


async def _serve(
    runtime: Any,
    settings: CoordinatorSettings,
    card: _ModelCard,
    binding: BindingPolicy,
    routing: RoutingPolicy,
    pools: PoolsPolicy,
    model: PerformanceModel,
) -> None:
    import asyncio

    from dynamo.common.utils.graceful_shutdown import install_signal_handlers

    from router.calls import DynamoCalls
    from router.coordinator import Coordinator
    from router.metrics import CoordinatorReader, RoundRecorder
    from router.presence import Presence
    from router.round_window import RoundWindow
    from router.standing import Standing, StandingPublisher

    try:
        store = await open_store(settings.state_url, settings.namespace)
    except StateUnavailableError as error:
        raise UserError(f"{PROG}: --state-url: {error}") from None
    calls = await DynamoCalls.connect(runtime, settings.namespace)
    recorder, window = RoundRecorder(), RoundWindow()
    observers = (recorder, window)
    coordinator = Coordinator(settings, calls, store, binding, routing, model, pools=pools, observers=observers)
    endpoint = runtime.endpoint(f"{settings.namespace}.{COORDINATOR_COMPONENT}.{COORDINATOR_ENDPOINT}")

    async def drain() -> None:
        try:
            async with asyncio.timeout(settings.drain_s):
                await coordinator.drained()
        except TimeoutError:
            log.warning("rounds still in progress after %g s are given up", settings.drain_s)
        await coordinator.stop()

    presence = Presence(endpoint, lambda: bool(coordinator.view.decode()))
    install_signal_handlers(
        asyncio.get_running_loop(), runtime, [presence], grace_period_s=settings.grace_s, drain_callback=drain
    )
    standing = Standing(f"{endpoint.connection_id():x}", coordinator, settings, window)
    publisher = StandingPublisher(store, standing, settings.lease_s)
    reader = CoordinatorReader(coordinator, settings, store)
    metrics = ProcessCollector(Process.COORDINATOR, recorder.recorded, reader, asyncio.get_running_loop())
    expose(
        metrics,
        endpoint,
        namespace=settings.namespace,
        component=COORDINATOR_COMPONENT,
        name=COORDINATOR_ENDPOINT,
        model_name=card.name,
    )
    try:
        await coordinator.start()
        publisher.start()
        system.say_where(runtime)
        system.say_ready(runtime, True)
        await card.register(endpoint)
        log.info(
            "coordinator %x serves model %s with routing %s, binding %s, pools %s",
            endpoint.connection_id(),
            card.name,
            settings.routing,
            settings.binding,
            settings.pools,
        )
        if await presence.until_ready():
            presence.start()
            await endpoint.serve_endpoint(coordinator.generate, graceful_shutdown=True)
    finally:
        await presence.stop()
        await publisher.stop()
        await coordinator.stop()
        await store.close()


def _known(flag: str, name: str | None, known: Sequence[str]) -> str | None:
    if name is not None and name not in known:
        raise UserError(f"{PROG}: {flag}: unknown parser {name!r}; known: {', '.join(sorted(known))}")
    return name


def _template(path: Path | None) -> str | None:
    if path is None:
        return None
    expanded = Path(os.path.expandvars(path)).expanduser().resolve()
    if not expanded.is_file():
        raise UserError(f"{PROG}: --custom-jinja-template: no file at {expanded}")
    return str(expanded)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Dynamo's runtime threads may outlive the interpreter's teardown and crash in it; everything is released by now.
    os._exit(code)
