"""Draw the Grafana dashboard from a graph that really runs, evaluated by a real Prometheus.

    python docs/pictures/dashboard.py --output docs/pictures/dashboard.png

It needs `prometheus` on the PATH (Debian: `apt-get install prometheus`), but neither Grafana nor a GPU. It starts a
graph with modelled engines (`ampd serve`) and a Prometheus that scrapes it each second, with our alert rules; replays a
shipped trace; kills a decode worker half-way, so that there is something to see; then asks Prometheus for what every
panel of `k8s/monitoring/dashboard.json` asks for, and draws the answers at the places of the panels. Nothing in it is
invented.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))

from dashboard_layout import Panel, Series, draw

from ampd.cli.serve.graph import TARGETS_FILE
from tools.demo import ampd_command, running_graph

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "k8s" / "monitoring"
GRAPH = ("--engine", "modelled", "--prefill", "2", "--decode", "3", "--coordinators", "2", "--port", "0")
PERF = ROOT / "k8s" / "base" / "performance-model.json"
SLO = ("--ttft", "1.5", "--itl", "0.045")
TRACE = "tau-bench-airline"
RATE = 1.5
RATE_INTERVAL_S = 15
"""What Grafana would put for `$__rate_interval`: some scrapes."""
STEP_S = 2
WARM_UP_S = 10.0


@dataclass(frozen=True)
class Prometheus:
    """A server that runs and how to ask it."""

    url: str

    def query_range(self, expression: str, start_s: float, end_s: float) -> list[Series]:
        """An expression's values every `STEP_S` seconds."""
        reply = httpx.get(
            f"{self.url}/api/v1/query_range",
            params={"query": expression, "start": start_s, "end": end_s, "step": STEP_S},
            timeout=30,
        )
        document = reply.json()
        if document["status"] != "success":
            raise SystemExit(f"dashboard: Prometheus refuses {expression}: {document['error']}")
        return [
            Series(result["metric"], [(float(at) - start_s, float(value)) for at, value in result["values"]])
            for result in document["data"]["result"]
        ]

    def is_ready(self) -> bool:
        """Whether it serves queries."""
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=1).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


def main() -> None:
    """Run the graph, ask, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("dashboard.png"))
    parser.add_argument("--seconds", type=float, default=180.0, help="how long the trace is replayed")
    args = parser.parse_args()
    if shutil.which("prometheus") is None:
        raise SystemExit("dashboard: prometheus is not on the PATH (Debian: apt-get install prometheus)")
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="ampd-dashboard-") as folder:
        panels = observed(dashboard, Path(folder), args.seconds)
    title = (
        f"{dashboard['title']}: {TRACE}, {RATE:g} sessions/s, modelled engines (Qwen3-32B on H20), 2 prefill and "
        "3 decode workers, one of which is killed half-way"
    )
    draw(panels, title, args.output)
    print(f"{args.output}: {args.output.stat().st_size / 1000:.0f} kB")


def observed(dashboard: dict[str, Any], folder: Path, seconds: float) -> list[Panel]:
    """The panels with what they show of a replay."""
    logs = folder / "logs"
    flags = [*GRAPH, *SLO, "--perf", str(PERF), "--log-dir", str(logs)]
    with running_graph(flags, print) as url, prometheus(folder, logs / TARGETS_FILE) as server:
        time.sleep(WARM_UP_S)
        start_s = time.time()
        replay(url, seconds)
        end_s = time.time()
        return [Panel.of(panel, answers(panel, server, start_s, end_s)) for panel in dashboard["panels"]]


def answers(panel: dict[str, Any], server: Prometheus, start_s: float, end_s: float) -> list[list[Series]]:
    """What each expression of a panel gives."""
    expressions = [filled(target["expr"], end_s - start_s) for target in panel.get("targets", [])]
    return [server.query_range(expression, start_s, end_s) for expression in expressions]


def filled(expression: str, range_s: float) -> str:
    """PromQL, with Grafana's variables filled in: everything is selected."""
    for variable, value in (
        ("$__rate_interval", f"{RATE_INTERVAL_S}s"),
        ("$__range", f"{range_s:.0f}s"),
        ("$namespace", ".*"),
        ("$dynamo_namespace", ".*"),
    ):
        expression = expression.replace(variable, value)
    return expression


def replay(url: str, seconds: float) -> None:
    """Replay the trace for `seconds`. Half-way a decode worker dies."""
    flags = ["--url", url, "--rate", str(RATE), "--limit", str(int(10 * RATE * seconds)), *SLO]
    client = subprocess.Popen([*ampd_command("replay"), TRACE, *flags], stdout=subprocess.DEVNULL)
    try:
        time.sleep(seconds / 2)
        os.kill(a_decode_worker(), signal.SIGKILL)
        time.sleep(seconds / 2)
        if client.poll() is not None:
            raise SystemExit(f"dashboard: the replay ended early (exit code {client.returncode})")
    finally:
        client.kill()
        client.wait()


def a_decode_worker() -> int:
    """The process id of one of the graph's decode workers, which are children of a child of ours."""
    lines = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    processes = [line.split(maxsplit=2) for line in lines.splitlines()]
    ours = {pid for pid, parent, _ in processes if parent == str(os.getpid())}
    return next(int(pid) for pid, parent, args in processes if parent in ours and "--role decode" in args)


@contextmanager
def prometheus(folder: Path, targets: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the graph as the PodMonitor would have it, and evaluates the alerts."""
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))["spec"]
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules), encoding="utf-8")
    config = folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump(scraping(targets)), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(["prometheus", *flags], stdout=log, stderr=log)
        try:
            server = Prometheus(f"http://{address}")
            while not server.is_ready():
                if process.poll() is not None:
                    raise SystemExit((folder / "prometheus.log").read_text())
                time.sleep(0.1)
            yield server
        finally:
            process.terminate()
            process.wait()


def scraping(targets: Path) -> dict[str, Any]:
    """The configuration: labels as they would be in Kubernetes, where `namespace` and `pod` come from the pods."""
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "5s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {
                "job_name": "ampd",
                "honor_labels": True,
                "file_sd_configs": [{"files": [str(targets)]}],
                "relabel_configs": [
                    {"source_labels": ["process"], "target_label": "pod"},
                    {"source_labels": ["process"], "regex": "([a-z]+).*", "target_label": "component"},
                    {"target_label": "namespace", "replacement": "local"},
                    {"action": "labeldrop", "regex": "process"},
                ],
            }
        ],
    }


if __name__ == "__main__":
    main()
