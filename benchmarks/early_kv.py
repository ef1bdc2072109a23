"""What rounds could gain if their KV began to move when they enter the queue, on a simulated cluster.

    python -m benchmarks.early_kv coding-agents --model qwen3-32b --gpu h100 --prefill 2xTP2 --decode 2xTP2
        --kv-store-gib-per-gpu 200 --rate 0.4 --itl 0.05        (flags of `ampd simulate`)

Two moves of KV begin later than that. The read of a history from its owner begins when the round's pass is the next
one. The copy from the worker's store to its device begins when the engine admits the round. Here each of them is
shortened by the time that the round has waited until then, as if links and device memory had been free for it. So the
figures bound the gain from above. Methods of compiled classes cannot be replaced, so run `make clean` before. `no pass
ahead` is the opposite: a read begins only when its pass has the slot.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from ampd.serving import prefill_queue
from ampd.settings import parse_settings
from planner import simulate_command
from planner.simulator.kv_memory import Reloads
from planner.simulator.rounds import Links, Rounds
from workloads.trace import load_trace


def early_reloads() -> list[Any]:
    """Copies to the device that began when their round entered the queue."""
    waited_s: dict[str, float] = {}
    join, admit = Rounds._join, Reloads.admit

    def joined(self: Rounds, round_: Any, entry: Any) -> None:
        if not round_.is_started:
            waited_s[round_.record.session_id] = self._loop.now_s - entry.task.arrival_s
        join(self, round_, entry)

    def admitted(self: Reloads, request: Any) -> None:
        admit(self, request)
        request.reload_s = max(0.0, request.reload_s - waited_s.pop(request.session_id, 0.0))

    return [patch.object(Rounds, "_join", joined), patch.object(Reloads, "admit", admitted)]


def early_reads() -> list[Any]:
    """Reads of histories that began when their round entered the queue."""
    waited_s = 0.0
    fetch, move = Rounds._fetch_history, Links.move

    def fetched(self: Rounds, round_: Any, entry: Any) -> None:
        nonlocal waited_s
        waited_s = self._loop.now_s - entry.task.arrival_s
        fetch(self, round_, entry)

    def moved(
        self: Links, kind: str, session: str, source: Any, target: Any, tokens: int, arrived: Callable[[], None]
    ) -> None:
        if kind != "kv-history" or not tokens or not waited_s:
            move(self, kind, session, source, target, tokens, arrived)
            return
        read_s = self._kv_read_s + self._model.kv_transfer_s(tokens, source.parallelism, target.parallelism)
        if read_s > waited_s:
            self.start(source.worker_id, target.worker_id, read_s - waited_s, arrived)
        else:
            arrived()

    return [patch.object(Rounds, "_fetch_history", fetched), patch.object(Links, "move", moved)]


def no_pass_ahead() -> list[Any]:
    """Reads that begin when their pass has the slot."""
    return [patch.object(prefill_queue, "PREFETCH", 0)]


VARIANTS: dict[str, Callable[[], list[Any]]] = {
    "as it is": list,
    "no pass ahead": no_pass_ahead,
    "reads begin in the queue": early_reads,
    "reloads begin in the queue": early_reloads,
    "both begin in the queue": lambda: [*early_reads(), *early_reloads()],
}


@contextmanager
def _changed(patches: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


def main(argv: Sequence[str]) -> None:
    settings = parse_settings(simulate_command.SimulateSettings, argv, "benchmarks.early_kv")
    sessions = load_trace(settings.trace, settings.limit)
    scene, combinations = simulate_command.case_of(settings, sessions)
    print(
        f"{'policies':24} {'rate':>5}  {'':26} {'rounds':>7} {'sessions':>8} {'TTFT ms':>8} {'P95':>8} {'reload s':>8}"
    )
    for combination in combinations:
        for name, patches in VARIANTS.items():
            with _changed(patches()):
                simulated = simulate_command.run_combination(scene, combination)
            result = simulated.result(scene.slo, scene.model.profile.kv_bytes_per_token)
            attained, ttft = result["attainment"], result["ttft_incremental_s"]
            print(
                f"{combination.label:24} {combination.rate or '-':>5}  {name:26} {attained['rounds']:7.2%} "
                f"{attained['sessions']:8.2%} {1e3 * ttft['mean']:8.1f} {1e3 * ttft['p95']:8.1f} "
                f"{result['kv_store']['reload_s']:8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
