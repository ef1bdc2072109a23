"""What strangers may see of the health of a graph."""

import json

import pytest
from aiohttp import web

from router.status_relay.relay import public_health
from tests.router.status_relay.serving import client_of_relay

COORDINATOR = {
    "component": "coordinator",
    "instance_id": 17857771674,
    "transport": {"tcp": "10.0.0.7:40023/f7/generate"},
}
WORKER = {"component": "worker", "instance_id": 76782106365, "transport": {"tcp": "10.0.0.8:34059/6a/kv"}}
ENDPOINTS = ["dyn://ampd.coordinator.generate", "dyn://ampd.worker.kv"]
HEALTHY = {"status": "healthy", "endpoints": ENDPOINTS, "instances": [COORDINATOR, WORKER]}
SHOWN = {"status": "healthy", "instances": [{"component": "coordinator"}]}


def test_ids_addresses_and_workers_are_left_out() -> None:
    assert public_health(json.dumps(HEALTHY).encode()) == SHOWN


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"status": "unhealthy", "message": "No endpoints at 10.0.0.7"}', {"status": "unhealthy"}),
        (b'{"status": "healthy", "instances": [5, null, {}]}', {"status": "healthy", "instances": []}),
        (b'{"status": 5, "instances": []}', {}),
        (b"10.0.0.7 is away", {}),
        (b"[" * 100_000, {}),
    ],
)
def test_what_is_not_understood_is_not_shown(body: bytes, shown: dict[str, object]) -> None:
    assert public_health(body) == shown


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/health", 503), ("/ready", 200)])
async def test_the_relay_answers_with_the_frontends_status(path: str, status: int) -> None:
    async def health(_: web.Request) -> web.Response:
        return web.json_response(HEALTHY, status=status)

    app = web.Application()
    app.router.add_get(path, health)
    async with (
        client_of_relay(web.AppRunner(app), health_path=path) as client,
        client.get(f"{path}?full=1") as answer,
    ):
        assert (answer.status, await answer.json()) == (status, SHOWN)
