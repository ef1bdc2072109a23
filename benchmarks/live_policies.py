"""Policies against each other on a live graph, and against what the simulator predicts of them.

    python -m benchmarks.live_policies [--engine sglang|modelled] [--perf FILE] [--layouts 1+1,1+2] [--runs 2] [--json]

1. The performance model: `--perf`, or `--model` and `--gpu`, or for SGLang what `ampd profile` measures now on this
   machine. With `--slow-down` modelled engines take a multiple of its times, so that a small machine keeps up.
2. For every layout (prefill + decode workers) one graph starts, whose policies can be switched
   (`benchmarks/switched.py`). Sessions that never meet calibrate what the model does not contain (as in
   `benchmarks/fidelity.py`). Unless given, the targets are those sessions' times in the first layout: twice the P90 of
   the TTFT, twice the mean ITL.
3. The same sessions are replayed for one contestant after the other, `--runs` times in turn, beginning with another
   one each time, and simulated once for each contestant with the calibrated overheads.
4. Printed: for every layout and contestant medians over the live runs, beside them the simulation; the share of rounds
   (by session and position) that went the simulated way, and the way of another live run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations, count
from pathlib import Path
from typing import Any

from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import analytic_model, load_performance_model
from ampd.perf.profile import PerformanceProfile, write_profile
from ampd.policies.registry import Kind
from ampd.telemetry.metrics import names
from ampd.types import WINDOW_S, Parallelism, Role, Slo
from benchmarks.fidelity import (
    Routes,
    calibration_sessions,
    equal_share,
    lone_overheads,
    measured_profile,
    routes_of,
    scaled,
)
from benchmarks.metrics_agreement import scrape
from benchmarks.policies.contest import Contestant
from benchmarks.policies.contestants import COLOCATED_OURS, OURS, OURS_STATIC
from benchmarks.switched import switch, switched_environment, switched_flags
from planner.simulator.options import Cluster, ReplicaGroup, SimulationOptions
from planner.simulator.simulate import simulate
from tools.demo import ampd_command, running_graph
from workloads.trace import Session, load_trace, retime, write_trace

CONTESTANTS = {
    each.label: each
    for each in (
        OURS_STATIC,
        OURS,
        COLOCATED_OURS,
        Contestant("ampd", "ampd", "ampd"),
        Contestant("always-remote", "always-remote"),
        Contestant("always-local", "always-local"),
    )
}
_CALIBRATING = CONTESTANTS["always-remote"]
_LOOSE = Slo(60.0, 60.0)
_SEEDS = count(1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; prints a Markdown table, or with `--json` one object."""
    options = _options(argv)
    with tempfile.TemporaryDirectory(prefix="ampd-live-policies-") as name:
        folder = Path(name)
        sessions = retime(load_trace(options.trace), options.rate, options.seed, options.sessions)
        sessions = scaled(sessions, options.time_scale)
        perf = options.perf or _own_model(folder, sessions, options)
        if options.slow_down != 1.0:
            perf = slowed(folder, perf, options.slow_down)
        bench = Bench(folder, sessions, perf, options)
        results = [row for layout in options.layouts for row in bench.contest(*layout)]
    result = {
        "engine": options.engine,
        "performance_model": bench.model.name,
        "trace": options.trace,
        "rate": options.rate,
        "sessions": len(sessions),
        "rounds": sum(len(session.rounds) for session in sessions),
        "runs": options.runs,
        "slo": {"ttft": bench.slo.ttft_s, "itl": bench.slo.itl_s},
        "overheads": bench.overheads,
        "results": results,
    }
    print(json.dumps(result, indent=1) if options.json else table(result))
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live_policies", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("sglang", "modelled"), default="sglang")
    parser.add_argument("--perf", help="performance model of the engines; default: measured now")
    parser.add_argument("--model", help="model of the modelled engines' times, with --gpu and without --perf")
    parser.add_argument("--gpu", help="GPU of the modelled engines' times")
    parser.add_argument("--slow-down", type=float, default=1.0, help="factor on the times of the modelled engines")
    parser.add_argument("--tp", type=int, default=1, help="degree of the workers (modelled engine)")
    parser.add_argument("--layouts", type=_layouts, default="1+1,1+2", help="prefill+decode workers, comma-separated")
    parser.add_argument("--contestants", type=_contestants, default=list(CONTESTANTS), help="labels, separated by ;")
    parser.add_argument("--trace", default="tau-bench-airline")
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--rate", type=float, default=0.25, help="Poisson sessions per second")
    parser.add_argument("--time-scale", type=float, default=1.0, help="factor on arrivals and tool gaps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--ttft", type=float, help="TTFT target in seconds; default: twice an unloaded P90")
    parser.add_argument("--itl", type=float, help="ITL target in seconds; default: twice the unloaded mean")
    parser.add_argument("--calibration", type=int, default=8, help="sessions that calibrate, one after the other")
    parser.add_argument("--records", type=Path, help="append every live run, a line of JSON each")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(argv)
    if (options.ttft is None) is not (options.itl is None):
        parser.error("--ttft and --itl belong together: give both or none")
    if (options.model is None) is not (options.gpu is None):
        parser.error("--model and --gpu belong together: give both or none")
    if options.engine == "sglang" and (options.model or options.slow_down != 1.0):
        parser.error("--model, --gpu and --slow-down need --engine modelled")
    return options


def _layouts(text: str) -> list[tuple[int, int]]:
    try:
        layouts = [(int(prefill), int(decode)) for prefill, decode in (part.split("+") for part in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"as in 1+1,1+2 (given: {text!r})") from None
    if any(prefill < 1 or decode < 1 for prefill, decode in layouts):
        raise argparse.ArgumentTypeError(f"at least one worker of each kind (given: {text!r})")
    return layouts


def _contestants(text: str) -> list[str]:
    labels = [label.strip() for label in text.split(";")]
    for label in labels:
        if label not in CONTESTANTS:
            raise argparse.ArgumentTypeError(f"unknown contestant {label!r}; known: {'; '.join(CONTESTANTS)}")
    return labels


def _own_model(folder: Path, sessions: Sequence[Session], options: argparse.Namespace) -> str:
    if options.model:
        file = folder / "model.json"
        write_profile(analytic_model(options.model, options.gpu).profile, file)
        return str(file)
    longest = max(session.max_context_tokens for session in sessions)
    return measured_profile(folder, longest) if options.engine == "sglang" else "tiny-cpu"


def slowed(folder: Path, perf: str, factor: float) -> str:
    """The file of a performance model whose computing and moving takes `factor` times as long."""
    file = folder / "slowed.json"
    profile = load_performance_model(perf).profile.model_dump(mode="json")
    write_profile(PerformanceProfile.model_validate(_slowed(profile, factor)), file)
    return str(file)


def _slowed(value: Any, factor: float, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _slowed(item, factor, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_slowed(item, factor) for item in value]
    is_time = "_s_per_" in key or key == "alpha_s"
    return factor * value if is_time else value


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _await_roles(logs: Path, prefill: int) -> None:
    """Wait until the graph has this many prefill workers, because its workers learn their roles one after the other."""
    while scrape(logs).total(names.LIVE_WORKERS, role=Role.PREFILL.value) != prefill:
        time.sleep(0.2)


class Bench:
    """The contest: sessions, performance model and targets are the same for all.

    Attributes:
        slo: the targets; known after the first calibration unless they were given.
        overheads: layout -> what was calibrated there.
    """

    def __init__(self, folder: Path, sessions: Sequence[Session], perf: str, options: argparse.Namespace) -> None:
        self.model: PiecewiseModel = load_performance_model(perf)
        self.slo = Slo(options.ttft, options.itl) if options.ttft else _LOOSE
        self.overheads: dict[str, dict[str, Any]] = {}
        self._folder = folder
        self._sessions = sessions
        self._perf = perf
        self._options = options
        self._theta = Parallelism(options.tp)
        self._capacity_tokens = self.model.kv_capacity_tokens(self._theta) or 0
        self._trace = folder / "trace.jsonl"
        write_trace(sessions, self._trace)
        self._contestants = [CONTESTANTS[label] for label in options.contestants]

    def contest(self, prefill: int, decode: int) -> list[dict[str, Any]]:
        """All contestants in one layout: a row for each."""
        layout = f"{prefill}+{decode}"
        live: dict[str, list[dict[str, Any]]] = {contestant.label: [] for contestant in self._contestants}
        with self._graph(prefill, decode) as play:
            self._calibrate(layout, play)
            for run in range(self._options.runs):
                first = run % len(self._contestants)
                for each in self._contestants[first:] + self._contestants[:first]:
                    load = os.getloadavg()[0]
                    result = play(each, self._trace)
                    reached = result["attainment"]
                    _say(
                        f"{layout} {each.label}: {reached['rounds']:.1%} of rounds, {reached['sessions']:.1%} of "
                        f"sessions, {result['role_changes']:g} changes of roles, load average before {load:.1f}"
                    )
                    live[each.label].append(result | {"load_before": load})
                    self._keep({"layout": layout, "contestant": each.label, "run": run, "load_before": load} | result)
        return [
            self._row(layout, contestant, live[contestant.label], prefill, decode) for contestant in self._contestants
        ]

    def _keep(self, run: dict[str, Any]) -> None:
        if self._options.records:
            with self._options.records.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")

    # -- live

    @contextmanager
    def _graph(self, prefill: int, decode: int) -> Iterator[Callable[[Contestant, Path], dict[str, Any]]]:
        """A running graph; gives how to replay a trace on it with a contestant's policies."""
        options, file = self._options, self._folder / f"switch-{prefill}-{decode}.json"
        flags = switched_flags(file)
        switch(file, _policies(_CALIBRATING), prefill, self.slo)
        serve = ["--engine", options.engine, "--port", "0", "--perf", self._perf, "--tp", str(options.tp)]
        logs = self._folder / f"logs-{prefill}-{decode}"
        serve += ["--prefill", str(prefill), "--decode", str(decode)]
        # The simulation refuses no round either.
        serve += ["--log-dir", str(logs), "--max-wait", "0"]
        serve += ["--ttft", str(self.slo.ttft_s), "--itl", str(self.slo.itl_s), *flags]
        if options.engine == "modelled" and self._capacity_tokens:
            serve += ["--worker-args", f"--kv-capacity-tokens {self._capacity_tokens}"]
        with running_graph(serve, _say, switched_environment()) as url:

            def play(contestant: Contestant, trace: Path) -> dict[str, Any]:
                # First the roles of the start again, and windows as empty as a simulation's.
                own_prefill = 0 if contestant.is_colocated else prefill
                switch(file, _policies(_CALIBRATING), own_prefill, self.slo)
                time.sleep(WINDOW_S + 1.0)
                _await_roles(logs, own_prefill)
                switch(file, _policies(contestant), own_prefill, self.slo)
                before = scrape(logs).total(names.ROLE_ASSIGNMENTS)
                result = self._replay(url, trace)
                return result | {"role_changes": scrape(logs).total(names.ROLE_ASSIGNMENTS) - before}

            yield play

    def _replay(self, url: str, trace: Path) -> dict[str, Any]:
        file = self._folder / "replay.json"
        argv = [*ampd_command("replay"), str(trace), "--url", url, "--json", str(file)]
        # Other words each time: a prefix that an engine knows from the run before costs nothing.
        argv += ["--ttft", str(self.slo.ttft_s), "--itl", str(self.slo.itl_s), "--seed", str(next(_SEEDS))]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return result

    def _calibrate(self, layout: str, play: Callable[[Contestant, Path], dict[str, Any]]) -> None:
        """Warm up, then measure lone rounds: overheads, and the targets if none were given."""
        options = self._options
        file = self._folder / "calibration.jsonl"
        write_trace(calibration_sessions(max(options.calibration // 2, 2)), file)
        play(_CALIBRATING, file)
        write_trace(calibration_sessions(options.calibration), file)
        lone = play(_CALIBRATING, file)
        self.overheads[layout] = lone_overheads(lone["records"], self.model, options.engine == "sglang", self._theta)
        if self.slo == _LOOSE:
            ttfts_s = [each["ttft_s"] for each in lone["records"]]
            self.slo = Slo(2.0 * statistics.quantiles(ttfts_s, n=10)[-1], 2.0 * lone["itl_s"]["mean"])
        _say(f"{layout} calibrated: {self.overheads[layout]}; TTFT {self.slo.ttft_s:.3f} s, ITL {self.slo.itl_s:.4f} s")

    # -- simulated

    def _simulated(
        self, layout: str, contestant: Contestant, prefill: int, decode: int
    ) -> tuple[dict[str, Any], Routes]:
        groups = [(ReplicaGroup(replicas, self._theta, self._capacity_tokens),) for replicas in (prefill, decode)]
        cluster = Cluster(prefill=groups[0], decode=groups[1])
        options = SimulationOptions(
            seed=self._options.seed,
            # The modelled engine joins a round that was prefilled elsewhere to the next step, SGLang gives it a pass.
            hand_over_pass=self._options.engine == "sglang",
            **self.overheads[layout],
        )
        cluster = contestant.cluster(cluster)
        run = simulate(self._sessions, cluster, self.model, contestant.policies(), self.slo, options)
        result = run.result(self.slo) | {"role_changes": run.role_flips}
        return result, {(done.session_id, done.index): done.route for done in run.rounds}

    # -- compared

    def _row(
        self, layout: str, contestant: Contestant, live: Sequence[dict[str, Any]], prefill: int, decode: int
    ) -> dict[str, Any]:
        simulated, routes = self._simulated(layout, contestant, prefill, decode)
        live_routes = [routes_of(run) for run in live]
        pairs = [equal_share(first, second) for first, second in combinations(live_routes, 2)]
        return {
            "layout": layout,
            "contestant": contestant.label,
            "policies": contestant.spec,
            "live": {name: statistics.median(read(run) for run in live) for name, read in _FIGURES.items()},
            "live_runs": [{name: read(run) for name, read in _FIGURES.items()} for run in live],
            "simulated": {name: read(simulated) for name, read in _FIGURES.items()},
            "routed_alike": statistics.median(equal_share(routes, run) for run in live_routes),
            "routed_alike_live": statistics.median(pairs) if pairs else None,
            "reasons": Counter(record["decision"].get("reason") for run in live for record in run["records"]),
            "errors": sum(run["errors"] for run in live),
            "load_before": [run["load_before"] for run in live],
        }


def _policies(contestant: Contestant) -> dict[Kind, str]:
    return {
        "binding": contestant.binding,
        "routing": contestant.routing,
        "ordering": contestant.ordering,
        "slicing": contestant.slicing,
        "pools": contestant.pools,
    }


_FIGURES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "rounds_attained": lambda result: result["attainment"]["rounds"],
    "sessions_attained": lambda result: result["attainment"]["sessions"],
    "ttft_mean_s": lambda result: result["ttft_s"]["mean"],
    "ttft_p95_s": lambda result: result["ttft_s"]["p95"],
    "itl_mean_s": lambda result: result["itl_s"]["mean"],
    "role_changes": lambda result: float(result["role_changes"]),
    "local_share": lambda result: result["routes"]["local"] / max(result["rounds"], 1),
}
"""The same keys in a live result and in a simulated one."""


def table(result: Mapping[str, Any]) -> str:
    """The result as a Markdown table; after each live figure the simulated one in parentheses."""
    slo = result["slo"]
    lines = [
        f"{result['sessions']} sessions of {result['trace']} at {result['rate']}/s ({result['rounds']} rounds), engine "
        f"{result['engine']}, {result['runs']} alternating runs, TTFT {slo['ttft'] * 1e3:.0f} ms, "
        f"ITL {slo['itl'] * 1e3:.1f} ms; live medians (simulated)",
        "",
        "| layout | policies | rounds attained | sessions attained | TTFT mean, ms | TTFT P95, ms | ITL mean, ms "
        "| changes of roles | local | routed as simulated | two live runs alike |",
        "| --- " * 11 + "|",
    ]
    for row in result["results"]:
        cells = [row["layout"], row["contestant"]]
        for name in _FIGURES:
            live, simulated = row["live"][name], row["simulated"][name]
            cells.append(_shown(name, live, simulated))
        among = row["routed_alike_live"]
        cells += [f"{row['routed_alike']:.1%}", "-" if among is None else f"{among:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(name: str, live: float, simulated: float) -> str:
    if name.endswith("_s"):
        return f"{1e3 * live:.1f} ({1e3 * simulated:.1f})"
    return f"{live:g} ({simulated:g})" if name == "role_changes" else f"{live:.1%} ({simulated:.1%})"


if __name__ == "__main__":
    sys.exit(main())
