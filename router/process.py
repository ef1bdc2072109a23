"""A coordinator process: one coordinator, its presence in discovery, its metrics, and its end on a signal."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from dynamo.common.utils.graceful_shutdown import install_signal_handlers

from ampd import compiled
from ampd.call_signatures import Signer, read_secrets
from ampd.child_process import exit_now
from ampd.discovery_entries import DiscoveryEntries, DiscoveryEntry, deletes_silent_entries, has_card
from ampd.errors import RunError, UserError
from ampd.state.redis_store import StateStore, open_store
from ampd.state.store import StateUnavailableError
from ampd.telemetry.metrics import exposition
from ampd.telemetry.metrics.exposition import ProcessCollector, expose
from ampd.telemetry.metrics.names import Process
from ampd.wire import COORDINATOR_COMPONENT, COORDINATOR_ENDPOINT
from router.calls import WorkerCalls
from router.coordinator import Coordinator
from router.coordinator_metrics import CoordinatorReader, RoundRecorder
from router.coordinator_publisher import CoordinatorViewPublisher, CoordinatorViewReader
from router.frames import FrameServer
from router.model_card import ModelCard, OtherCards, smallest_context_tokens
from router.policies import CoordinatorPolicies
from router.presence import Presence
from router.round_window import RoundWindow
from router.settings import PROG, CoordinatorSettings

log = logging.getLogger("router")


async def serve_coordinator(
    runtime: Any, settings: CoordinatorSettings, card: ModelCard, policies: CoordinatorPolicies
) -> None:
    """Serve until a signal comes.

    Raises:
        UserError: the shared state does not answer, or the file of the graph's secret is not usable.
    """
    keys = read_secrets(settings.graph_secret_file, PROG)
    try:
        store = await open_store(settings.state_url, settings.namespace)
    except StateUnavailableError as error:
        raise UserError(f"{PROG}: --state-url: {error}") from None
    try:
        endpoint = _endpoint(runtime, settings)
        signer = Signer(keys, f"{COORDINATOR_COMPONENT}-{endpoint.connection_id():x}")
        calls = await WorkerCalls.connect(runtime, settings.namespace, signer)
        process = CoordinatorProcess(runtime, settings, card, policies, store, calls)
        await process.run(keys)
    finally:
        await store.close()
    if process.has_given_up:
        # The end of the event loop would cancel the rounds, and their clients would get that as an error. A connection
        # that is lost lets another coordinator go on.
        exit_now(0)


class CoordinatorProcess:
    """The parts of one process, wired together."""

    def __init__(
        self,
        runtime: Any,
        settings: CoordinatorSettings,
        card: ModelCard,
        policies: CoordinatorPolicies,
        store: StateStore,
        calls: WorkerCalls,
    ) -> None:
        self._runtime = runtime
        self._settings = settings
        self._card = card
        self._endpoint = _endpoint(runtime, settings)
        recorder, window = RoundRecorder(), RoundWindow()
        coordinator = Coordinator(
            settings,
            calls,
            store,
            policies,
            observers=(recorder, window),
            vocabulary_size=card.vocabulary_size,
            tokenizer=card.tokenizer,
        )
        coordinator.counts.on_add = window.add
        self._coordinator = coordinator
        self._frames = FrameServer(coordinator.take)
        self._has_given_up = asyncio.Event()
        self._presence = Presence(self._entry(), lambda: bool(coordinator.view.decode()))
        path = f"{settings.namespace}/{COORDINATOR_COMPONENT}/{COORDINATOR_ENDPOINT}"
        self._entries = DiscoveryEntries(self._presence.wanted_entries, path)
        coordinator_id = f"{self._endpoint.connection_id():x}"
        view_reader = CoordinatorViewReader(
            coordinator_id, coordinator, settings, window, lambda: card.registered_tokens
        )
        self._publisher = CoordinatorViewPublisher(
            store, coordinator_id, view_reader, settings.lease_s, on_answer=coordinator.store_answered
        )
        self._others = OtherCards(store, coordinator_id, self._publisher.publish)
        self._expose(recorder, CoordinatorReader(coordinator, settings, store, self._frames))

    @property
    def has_given_up(self) -> bool:
        """Rounds were still in progress when the time for them was over."""
        return self._has_given_up.is_set()

    async def run(self, keys: tuple[bytes, ...]) -> None:
        """Serve until a signal comes.

        Args:
            keys: the secrets of the graph.

        Raises:
            RunError: Dynamo ended before that.
        """
        install_signal_handlers(
            asyncio.get_running_loop(),
            self._runtime,
            [self._presence],
            grace_period_s=self._settings.grace_s,
            drain_callback=self._drain,
        )
        try:
            await self._start(keys)
            if await self._presence.until_ready():
                await self._register()
                self._presence.start()
                if deletes_silent_entries():
                    self._entries.start()
                await self._serve()
                if not self._presence.is_leaving:
                    raise RunError(
                        f"{PROG}: Dynamo ended without a signal; its lines above say why (a watch that ended: the "
                        "machine is out of inotify instances, see fs.inotify.max_user_instances)"
                    )
        finally:
            await self._entries.stop()
            await self._presence.stop()
            await self._publisher.stop()
            await self._coordinator.stop()

    async def _serve(self) -> None:
        """Serve until Dynamo has ended the endpoint, or until the last rounds are given up: Dynamo waits for them.

        What they lose is the connection, so that a frontend that may migrate has another coordinator go on with them.
        """
        # A connection that a frontend made before would pass by it.
        await self._frames.start(self._runtime, self._settings.namespace)
        serving = asyncio.ensure_future(
            self._endpoint.serve_endpoint(self._coordinator.generate, graceful_shutdown=True)
        )
        giving_up = asyncio.create_task(self._has_given_up.wait())
        try:
            await asyncio.wait({serving, giving_up}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            serving.cancel()
            giving_up.cancel()
            self._frames.stop()

    async def _start(self, keys: tuple[bytes, ...]) -> None:
        settings = self._settings
        await self._coordinator.start(keys)
        self._coordinator.sessions(keys).register(self._runtime)
        self._publisher.start()
        exposition.log_address(self._runtime)
        exposition.answer_liveness(self._runtime)
        exposition.set_ready(self._runtime, True)
        await self._register()
        log.info(
            "coordinator %x serves model %s with routing %s, binding %s, pools %s, performance model %s; decisions: %s",
            self._endpoint.connection_id(),
            self._card.name,
            settings.routing,
            settings.binding,
            settings.pools,
            settings.perf,
            compiled.state(),
        )

    async def _register(self) -> None:
        tokens = smallest_context_tokens(self._coordinator.view.decode())
        await self._card.register(self._endpoint, tokens, self._others)

    def _entry(self) -> DiscoveryEntry:
        if not deletes_silent_entries():
            return DiscoveryEntry(self._endpoint)
        # Others may have deleted the model's card too, or alone.
        return DiscoveryEntry(self._endpoint, self._enter_again, lambda: has_card(self._endpoint.connection_id()))

    async def _enter_again(self) -> None:
        await self._card.register_again(self._endpoint)
        await self._endpoint.register_endpoint_instance()

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._settings.drain_s):
                await self._coordinator.drained()
        except TimeoutError:
            log.warning("rounds still in progress after %g s are given up", self._settings.drain_s)
            self._has_given_up.set()
        await self._coordinator.stop()

    def _expose(self, recorder: RoundRecorder, reader: CoordinatorReader) -> None:
        expose(
            ProcessCollector(Process.COORDINATOR, recorder.recorded, reader, asyncio.get_running_loop()),
            self._endpoint,
            namespace=self._settings.namespace,
            component=COORDINATOR_COMPONENT,
            name=COORDINATOR_ENDPOINT,
            model_name=self._card.name,
        )


def _endpoint(runtime: Any, settings: CoordinatorSettings) -> Any:
    return runtime.endpoint(f"{settings.namespace}.{COORDINATOR_COMPONENT}.{COORDINATOR_ENDPOINT}")
