"""Compiled modules decide what the interpreted ones decide, to the last bit."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from ampd.child_process import reserved_ports
from ampd.cli.serve.graph import dynamo_environment
from ampd.cli.serve.processes import Supervisor
from ampd.compiled import ROOT
from tests.harness.graph import HELLO, Graph, ask, chat, profile, session
from tests.harness.tcp_redis import TcpRedis
from tests.waiting import PATIENCE_S
from tools import compile as compiling

SCENE = "--model qwen3-32b --gpu h20 --prefill 2xTP2 --decode 2xTP2 --ttft 0.5 --itl 0.04"
TAU = f"tau-bench-airline {SCENE} --limit 60"
FEW = f"tau-bench-airline {SCENE} --limit 25"
FEW_MIXED = "tau-bench-airline --model qwen3-32b --gpu h20 --ttft 0.5 --itl 0.04 --limit 25 --rate 6"
SIMULATIONS = {
    "default": f"{TAU} --rate 3",
    "overload": f"{TAU} --rate 12",
    "paper": f"{TAU} --rate 5 --routing ampd --ordering ampd --slicing whole",
    "coding-agents": f"coding-agents {SCENE} --rate 0.3 --limit 12",
    "modes": f"{TAU} --rate 4 --mode disaggregated,always-remote,colocated",
    "delayed views": f"{TAU} --rate 5 --state-delay-s 0.05 --coordinators 3 --kv-read-s 0.004",
    "no hand-over pass": f"coding-agents {SCENE} --rate 0.3 --limit 10 --no-hand-over-pass",
    "pools": f"{TAU} --rate 8 --pools predictive,arrow --binding predictive",
    "store": f"{TAU} --rate 4 --kv-capacity-tokens 20000 --kv-store-gib-per-gpu 4 --moves any --max-wait 3",
    "rivals": f"{TAU} --rate 9 --routing deflection,laps,table --ordering kairos,edf,hrrn",
    "mixed passes": f"{FEW} --rate 6 --slicing slack",
    "co-located mixed passes": f"{FEW} --rate 6 --mode colocated --ordering fcfs --slicing dynaserve",
    "taichi": f"{FEW_MIXED} --mixed 2xTP2 --decode 2xTP2 --routing taichi --ordering fcfs --slicing taichi"
    " --binding taichi",
}
"""Name -> arguments of `benchmarks.detailed_simulation`."""

PLANS = {
    "plan": "tau-bench-airline --limit 60 --model qwen3-32b --gpu h20 --gpus 4 --degrees 1,2 --rate 1 --ttft 0.5"
    " --itl 0.04 --jobs 1 --budget-s 3600",
}
"""Name -> arguments of `ampd plan`. The time never ends a search, because plans would differ then."""

PROGRAM = """
import contextlib, hashlib, io, json, sys
from ampd import compiled
from ampd.cli.main import main
from benchmarks.detailed_simulation import detailed_result
from planner.layout import plan, search
from planner.layout.trial import Horizon

# A search tries hundreds of simulations: short ones, as in the tests of the planner.
search.SHORT = plan.ONCE = Horizon(2.0, 0.0, 20, 60)
search.LONG = Horizon(4.0, 0.0, 30, 120)

def printed(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = main([*words, "--json"])
    if code:
        raise SystemExit(f"{words}: exit code {code}")
    result = json.loads(out.getvalue())
    for each in [result, *result.get("results", ())]:
        for wall_time in ("seconds", "wall_s"):
            each.pop(wall_time, None)
    return json.dumps(result, sort_keys=True)

simulations, plans = json.loads(sys.argv[1])
texts = {name: printed("plan", *words.split()) for name, words in plans.items()}
for name, words in simulations.items():
    with contextlib.redirect_stderr(io.StringIO()):
        texts[name] = json.dumps(detailed_result([*words.split(), "--jobs", "1"]), sort_keys=True)
digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
print(json.dumps({"state": compiled.state(), "asserts": __debug__, "digests": digests}))
"""


NEEDS_COMPILER = pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc")) or not Path(sysconfig.get_path("include"), "Python.h").is_file(),
    reason="no C compiler, or no headers of Python",
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages with a build beside it."""
    folder = tmp_path_factory.mktemp("copy")
    for package in (*compiling.PACKAGES, "benchmarks", "tools", "router", "workers"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    # Without optimization the compiler takes a fifth of the time, and floating point is the same.
    run(folder, "-m", "tools.compile", "--optimization", "0")
    return folder


def run(folder: Path, *words: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout


def digests(
    folder: Path, *flags: str, simulations: Mapping[str, str] = SIMULATIONS, **environment: str
) -> dict[str, Any]:
    """What simulations and plans print, as digests. `flags`: of Python."""
    given = json.dumps([simulations, PLANS])
    found: dict[str, Any] = json.loads(run(folder, *flags, "-c", PROGRAM, given, **environment))
    return found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
@NEEDS_COMPILER
async def test_coordinators_and_workers_of_a_graph_run_compiled(
    copy: Path, tmp_path: Path, redis_server: TcpRedis
) -> None:
    """They publish views and read those of the others, which are checked by the annotations of compiled classes."""
    environment = {"DYN_LOG": "info", "PYTHONPATH": str(copy), "PYTHONSAFEPATH": "1"}
    environment |= dynamo_environment(tmp_path / "discovery")
    with reserved_ports("127.0.0.1", 1) as (port,), ExitStack() as stack:
        supervisor = Supervisor(tmp_path)
        stack.callback(supervisor.stop)
        graph = Graph(tmp_path, redis_server.url, "compiled", port, supervisor, environment, iter(()))
        perf = profile(tmp_path, prefill_s=0.001, long_prefill_s=0.002, step_s=0.001)
        coordinator = graph.start_coordinator("predictive")
        graph.start_frontend()
        members = [coordinator]
        for role in ("prefill", "decode"):
            members.append(graph.processes[await graph.new_worker(role, perf, "--slicing", "slack", module="workers")])
        await graph.until_answers([coordinator])
        async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
            first, second = [(await ask(client, [5] * tokens, "s"))[1] for tokens in (200, 300)]
            assert second["hist_tokens"] > 0, (first, second)
            # Several at once, so that queues are published.
            replies = await asyncio.gather(
                *(
                    client.post("/v1/chat/completions", json=chat(HELLO, max_tokens=40), headers=session(f"s{n}"))
                    for n in range(16)
                )
            )
            assert {reply.status_code for reply in replies} == {200}
        assert not supervisor.ended()
        for name in members:
            assert "decisions: compiled" in graph.log(name)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
@NEEDS_COMPILER
def test_compiled_simulations_and_plans_equal_the_interpreted_ones(copy: Path) -> None:
    compiled = digests(copy)
    assert compiled["state"] == "compiled"
    # A change of one source, and nothing of the build is used.
    with (copy / "ampd" / "policies" / "estimates.py").open("a") as source:
        source.write("\n")
    interpreted = digests(copy)
    assert interpreted["state"] == "pure Python: ampd.policies.estimates differs from what was built (make compiled)"
    assert compiled["digests"] == interpreted["digests"]
    assert compiled["digests"].keys() == SIMULATIONS.keys() | PLANS.keys()


@pytest.mark.slow
@pytest.mark.long
def test_python_without_asserts_simulates_and_plans_the_same(tmp_path: Path) -> None:
    """`python -O` strips them from interpreted modules. Compiled ones, which this checkout may have, keep them."""
    runs = {}
    for flags in ((), ("-O",)):
        # Timelines are written into the folder, and the packages come from the checkout.
        few = {name: SIMULATIONS[name] for name in ("overload", "store")}
        runs[flags] = digests(tmp_path, *flags, simulations=few, PYTHONPATH=str(ROOT))
    assert [each.pop("asserts") for each in runs.values()] == [True, False]
    assert runs[()] == runs["-O",]


def test_without_a_compiler_a_build_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tools.compile"])
    monkeypatch.setenv("PATH", "")
    assert compiling.main() == 2
    assert capsys.readouterr().err.strip() == (
        "ampd: a build needs a C compiler: apt install gcc; without a build everything runs in pure Python"
    )
