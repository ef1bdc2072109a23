"""The benchmark of the shared state by the size of a graph."""

from ampd.state.embedded import EmbeddedRedis
from ampd.types import Role
from benchmarks.scaling import bind, measure, synthetic_workers


def test_the_workers_hold_all_sessions_in_equal_parts() -> None:
    views = synthetic_workers(8, [f"s{number}" for number in range(60)])
    held = [len(view.held_tokens) for view in views if view.role is Role.DECODE]
    assert (len(views), held) == (8, [10] * 6)
    assert len({session for view in views for session in view.held_tokens}) == 60


async def test_every_figure_of_a_size_is_measured() -> None:
    with EmbeddedRedis() as server:
        figures = await measure(server.url, 4, await bind(server.url, 30), calls=10)
    assert (figures["workers"], figures["sessions"]) == (4, 30)
    assert figures["view_bytes"] > 10 * len("32 hexadecimal digits of a session")
    for name in ("ping", "route", "publish"):
        assert figures[name]["redis_us"] >= 0
        assert figures[name]["caller_us"] > 0
    assert figures["applied_us"] > 0
    assert figures["snapshot_ms"] > 0
