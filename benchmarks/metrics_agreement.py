"""What a graph's metrics say of a replay, beside what the replay's client measured itself.

    python -m benchmarks.metrics_agreement [--engine sglang] [--prefill 2 --decode 2] [--rate 3 --sessions 40] [--json]

A graph is started and a trace replayed against it; every process's metrics are scraped before and after. The client
starts its clock before the request leaves and stops it when the first token has arrived, the coordinator when the
request is there and when the token leaves: so each TTFT is a little longer at the client, by the way there and back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString

from ampd.cli.serve.graph import TARGETS_FILE
from ampd.errors import RunError
from ampd.telemetry.metrics import names
from ampd.telemetry.metrics.names import Metric
from ampd.types import Slo
from tools.demo import running_graph
from workloads.endpoint import SAFE_TOKENS, Endpoint, synthetic_token_ids
from workloads.replay_command import ReplayPlan, replay
from workloads.results import RoundRecord, summarise
from workloads.trace import Session, load_trace, retime

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True)
class Scraped:
    """Samples of all processes of a graph: (sample name, sorted labels) -> value."""

    samples: Samples

    def since(self, before: Scraped) -> Scraped:
        """What has been added to counters and histograms since an earlier scrape."""
        return Scraped({key: value - before.samples.get(key, 0.0) for key, value in self.samples.items()})

    def total(self, metric: Metric, suffix: str = "", **labels: str) -> float:
        """Sum of a metric's samples that carry these labels; `suffix`: `_sum`, `_count` or `_bucket`."""
        return sum(
            value
            for (name, has), value in self.samples.items()
            if name == metric.name + suffix and labels.items() <= dict(has).items()
        )

    def mean(self, metric: Metric, **labels: str) -> float:
        """Mean of a histogram's observations."""
        return self.total(metric, "_sum", **labels) / (self.total(metric, "_count", **labels) or 1)

    def at_most(self, metric: Metric, bound: float, **labels: str) -> float:
        """Observations of a histogram that are at most one of its bounds."""
        return self.total(metric, "_bucket", le=floatToGoString(bound), **labels)


def scrape(log_dir: Path) -> Scraped:
    """Read /metrics of all processes that `ampd serve --log-dir` lists."""
    samples: Samples = {}
    for target in json.loads((log_dir / TARGETS_FILE).read_text(encoding="utf-8")):
        reply = httpx.get(f"http://{target['targets'][0]}/metrics", timeout=30).raise_for_status()
        for family in text_string_to_metric_families(reply.text):
            samples |= {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in family.samples}
    return Scraped(samples)


@dataclass(frozen=True)
class Replayed:
    """What the client of a replay saw."""

    result: Mapping[str, Any]
    records: Sequence[RoundRecord]


def _scrape_idle(log_dir: Path) -> Scraped:
    """Scrape when no round is in progress: one is counted at its end, a moment after its client has the last token."""
    for _ in range(1200):
        if not (scraped := scrape(log_dir)).total(names.ROUNDS_IN_PROGRESS):
            return scraped
        time.sleep(0.05)
    raise RunError("rounds are still in progress a minute after the last one's end")


def replayed(folder: Path, serve: Sequence[str], sessions: Sequence[Session], slo: Slo) -> tuple[Replayed, Scraped]:
    """Start a graph with the flags `serve` and replay: what the client saw, and what the metrics grew by meanwhile."""
    flags = ["--port", "0", "--log-dir", str(folder), "--ttft", str(slo.ttft_s), "--itl", str(slo.itl_s)]
    with running_graph([*serve, *flags], _say) as url:
        return asyncio.run(_replay(url, folder, sessions, slo))


async def _replay(url: str, folder: Path, sessions: Sequence[Session], slo: Slo) -> tuple[Replayed, Scraped]:
    probe = {"ids": synthetic_token_ids(8, "probe", SAFE_TOKENS.first, SAFE_TOKENS.last)}
    async with Endpoint(url, None, 600.0) as endpoint:
        model, dynamo = await endpoint.choose_model(None)
        dialect = await endpoint.negotiate(model, "completions", dynamo, probe)
        before = _scrape_idle(folder)
        plan = ReplayPlan(model, dialect, run_id=uuid4().hex[:12], slo=slo)
        run = await replay(sessions, endpoint, plan, asyncio.Event(), lambda _: None)
    result = summarise(run.records, run.rounds_planned, slo, run.duration_s)
    return Replayed(result, run.records), _scrape_idle(folder).since(before)


@dataclass(frozen=True)
class Row:
    """One figure: what the client has, what the metrics say."""

    what: str
    client: float
    metrics: float
    is_count: bool = True

    @property
    def off(self) -> float:
        """Relative difference from the client's figure."""
        return abs(self.metrics - self.client) / abs(self.client) if self.client else float(self.metrics != 0)


def compared(replayed: Replayed, scraped: Scraped) -> list[Row]:
    """Every figure that both sides have."""
    result, done = replayed.result, [record for record in replayed.records if record.ttft_s is not None]
    initial = [each.ttft_s for each in done if each.ttft_s is not None and each.index == 0]
    incremental = [each.ttft_s for each in done if each.ttft_s is not None and each.index > 0]
    itl_s = [each.itl_s for each in done if each.itl_s is not None]
    rounds = scraped.total(names.ROUNDS)
    return [
        Row("rounds", result["rounds"], rounds),
        Row("errors", result["errors"], scraped.total(names.ROUNDS, outcome=names.FAILED)),
        Row("sessions", result["sessions"], scraped.total(names.SESSIONS_BOUND)),
        Row("local prefills", result["routes"]["local"], scraped.total(names.ROUTES, route="local")),
        Row("remote prefills", result["routes"]["remote"], scraped.total(names.ROUTES, route="remote")),
        Row("initial rounds", len(initial), scraped.total(names.TTFT, "_count", prefill=names.INITIAL)),
        Row("output tokens", result["output_tokens"], scraped.total(names.OUTPUT_TOKENS)),
        Row("KV bytes, history", result["kv_bytes"]["history"], _kv_bytes(scraped, names.HISTORY)),
        Row("KV bytes, increment", result["kv_bytes"]["increment"], _kv_bytes(scraped, names.INCREMENT)),
        Row("attainment of rounds", result["attainment"]["rounds"], _attainment(scraped), is_count=False),
        Row("mean TTFT, initial (s)", _mean(initial), scraped.mean(names.TTFT, prefill=names.INITIAL), False),
        Row(
            "mean TTFT, incremental (s)", _mean(incremental), scraped.mean(names.TTFT, prefill=names.INCREMENTAL), False
        ),
        Row("mean of the rounds' ITL (s)", _mean(itl_s), scraped.mean(names.ITL), False),
    ]


def later_than_measured(replayed: Replayed, scraped: Scraped) -> list[float]:
    """Bounds of the TTFT histogram below which it has fewer rounds than the client: none, whatever the machine does."""
    ttfts_s = sorted(record.ttft_s for record in replayed.records if record.ttft_s is not None)
    return [bound for bound in names.TTFT.buckets if scraped.at_most(names.TTFT, bound) < bisect_right(ttfts_s, bound)]


def table(rows: Sequence[Row]) -> str:
    """As Markdown."""
    lines = ["| figure | client | metrics | difference |", "| --- | --- | --- | --- |"]
    for row in rows:
        digits = ".0f" if row.is_count else ".4f"
        lines.append(f"| {row.what} | {row.client:{digits}} | {row.metrics:{digits}} | {row.off:.1%} |")
    return "\n".join(lines)


def _attainment(scraped: Scraped) -> float:
    judged = scraped.total(names.ROUNDS) - scraped.total(names.ROUNDS, outcome=names.ABANDONED)
    return scraped.total(names.ROUNDS, outcome=names.MET) / (judged or 1)


def _kv_bytes(scraped: Scraped, direction: str) -> float:
    return scraped.total(names.KV_READ_BYTES, direction=direction)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; prints a Markdown table, or with `--json` one object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.metrics_agreement", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("sglang", "modelled"), default="modelled")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--trace", default="tau-bench-airline")
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--rate", type=float, default=3.0, help="Poisson sessions per second")
    parser.add_argument("--ttft", type=float, default=1.0, help="TTFT target in seconds")
    parser.add_argument("--itl", type=float, default=0.05, help="ITL target in seconds")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(argv)
    serve = [
        "--engine",
        options.engine,
        "--prefill",
        str(options.prefill),
        "--decode",
        str(options.decode),
        "--pools",
        "static",
    ]
    sessions = retime(load_trace(options.trace), options.rate, 0, options.sessions)
    with tempfile.TemporaryDirectory(prefix="ampd-agreement-") as name:
        client, scraped = replayed(Path(name), serve, sessions, Slo(options.ttft, options.itl))
    rows = compared(client, scraped)
    figures = {row.what: {"client": row.client, "metrics": row.metrics, "off": row.off} for row in rows}
    print(json.dumps({"engine": options.engine, "figures": figures}, indent=1) if options.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
