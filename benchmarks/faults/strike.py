"""One fault from the moment that it waits for until it is healed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from benchmarks.faults.fault import Fault, Scene
from benchmarks.faults.moments import MissedMomentError
from tests.waiting import until

STRIKES_WITHIN_S = 10.0
"""How long after its time a fault may still hit something. Later it counts as one that hit nothing."""


@dataclass
class Struck:
    """When a fault began and ended, on the clock of `time.monotonic`.

    Attributes:
        missed: why the run proves nothing about the moment, or None.
    """

    struck_s: float
    healed_s: float
    missed: MissedMomentError | None = None


async def strike(fault: Fault, scene: Scene) -> Struck:
    """Bring the victim to the moment, strike, wait, heal, and start the processes that have ended again.

    The victim's round may go on afterwards: `Stage.finish` waits for it.
    """
    struck = Struck(time.monotonic(), time.monotonic())
    try:
        await scene.stage.begin(scene.moment)
        await fault.enter(scene)
        await scene.stage.reach(scene.moment)
        scene.processes = scene.stage.processes()
        struck.struck_s, clock_s = time.monotonic(), time.time()
        await fault.strike(scene)
        scene.stage.resume()
        scene.stage.check(scene.moment, clock_s)
        await asyncio.sleep(fault.holds_s)
        await _until_it_has_struck(fault, scene)
    except MissedMomentError as error:
        struck.missed = error
    finally:
        if scene.processes or scene.kept:  # nothing to heal if the first round failed
            await fault.heal(scene)
        struck.healed_s = time.monotonic()
        await scene.graph.replace_ended()
    return struck


async def _until_it_has_struck(fault: Fault, scene: Scene) -> None:
    """Wait, because the next read of KV may be behind long prefills.

    Raises:
        MissedMomentError: the fault hit nothing.
    """
    try:
        await until(lambda: fault.has_struck(scene), STRIKES_WITHIN_S, poll_s=0.1)
    except TimeoutError:
        raise MissedMomentError(f"{scene.moment}: {fault.name} hit nothing") from None
