"""`python -m router` with the harness inside: its debug view, and exceptions in its long-lived tasks."""

from __future__ import annotations

from typing import Any

from ampd.child_process import exit_now
from benchmarks.faults.clock import install_clock
from benchmarks.faults.inside import open_control
from benchmarks.faults.worker import install_tasks


def install() -> None:
    """Put the harness into the modules of the coordinator, before its process starts."""
    from router.coordinator import Coordinator

    start = Coordinator.start

    async def controlled(coordinator: Coordinator, keys: tuple[bytes, ...] = ()) -> None:
        await start(coordinator, keys)
        coordinator.control = await open_control(lambda: figures(coordinator))  # type: ignore[attr-defined]

    Coordinator.start = controlled
    install_tasks()
    install_clock()


def figures(coordinator: Any) -> dict[str, Any]:
    """What must be zero when no round is in progress, and the workers that this replica knows."""
    views = (*coordinator.view.decode(), *coordinator.view.prefill())
    return {
        "rounds": coordinator.running,
        "rounds at workers": len(coordinator._ends._runs),
        "refusals": len(coordinator._refusals),
        "background work": len(coordinator._background._tasks),
        "queued": sum(len(view.queue) for view in views),
        "workers": sorted(view.worker_id for view in views),
        "connected": coordinator.view.connected,
    }


if __name__ == "__main__":
    from router.__main__ import main

    install()
    exit_now(main())
