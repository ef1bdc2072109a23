"""The reference of all metrics, written from `names`: `python -m docs.reference.metrics > docs/metrics.md`."""

from __future__ import annotations

from ampd.telemetry.metrics.names import METRICS, Kind, Metric, Process

_HEAD = """\
# Metrics

<!-- Written by: python -m docs.reference.metrics > docs/metrics.md -->

Coordinators and workers expose Prometheus metrics on Dynamo's system port, beside Dynamo's own (`dynamo_component_*`)
and with its labels: `dynamo_namespace`, `dynamo_component`, `dynamo_endpoint`, `worker_id` (the process's instance id
in hexadecimal; coordinators have one too), `model`, `model_name`. The frontend has Dynamo's metrics
(`dynamo_frontend_*`) at its HTTP port. No label names a session, a request or a peer; each takes its values from a
fixed, small set. A `reason` that a policy makes up counts as itself if it is plain words with hyphens, up to 64 of
them, and otherwise as `other`.

## Where

`DYN_SYSTEM_PORT` of a process is the port of `/metrics`, `/health` and `/live`: 1 to 32767 (Dynamo reads it as a signed
16-bit number), 0 any free one, -1 none (the default). `DYN_SYSTEM_HOST` is the address, all by default. If the port is
taken the process serves without metrics and says so in one line of its log; any other value is refused at the start.

`ampd serve` gives every process a port of its own and writes them to `metrics.json` among the logs, which Prometheus
reads as it is (`--no-metrics` opens none):

```yaml
scrape_configs:
  - job_name: ampd
    file_sd_configs: [{files: [/path/to/logs/metrics.json]}]
```

A scrape reads gauges on the process's event loop. If that hangs for a second the scrape holds what was counted and
leaves the gauges out, and the log says so.

## Health

`/health` and `/live` give the same answer, as in all of Dynamo: 200 when this process can do its work, 503 before that.
A worker can when its engine has started and its endpoints are served, until its engine is lost. A coordinator can when
it knows the shared state, whether or not there is a decode worker: without one it stays out of Dynamo's discovery, the
frontend answers 503, and `ampd_live_workers{role="decode"}` is 0, but ending the process would mend nothing. Neither
follows Redis, because both serve without it; `ampd_state_available` tells. So on Kubernetes `/live` is fit for startup
and liveness probes and `/health` for readiness. The startup probe of a worker must allow for the loading of its model.
`DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS`, which Dynamo's operator may set, is ignored.

## Attainment

The share of rounds that met both targets of theirs:

```promql
sum(rate(ampd_rounds_total{outcome="met"}[5m])) / sum(rate(ampd_rounds_total{outcome!="abandoned"}[5m]))
```

A round counts against its own targets if it brought some, else against the `ampd_slo_*` defaults. Counters give the
exact share; a histogram would give that of the next bucket. ITL is the mean of a round, for that is what a target is
compared with; `ampd_token_gap_seconds` has the single gaps, as the worker sees them leave the engine, in which a
prefill that stalls the batch shows.
"""

_PROCESSES = {
    (Process.COORDINATOR,): "Coordinators",
    (Process.WORKER,): "Workers",
    (Process.COORDINATOR, Process.WORKER): "Coordinators and workers",
}


def render() -> str:
    """The reference as Markdown."""
    parts = [_HEAD]
    for processes, title in _PROCESSES.items():
        parts.append(f"## {title}\n\n| metric | kind | labels | |\n| --- | --- | --- | --- |")
        parts += [_row(metric) for metric in METRICS if metric.processes == processes]
        parts.append("")
    parts.append("## Buckets\n\nUpper bounds in seconds.\n")
    parts += [_buckets(metric) for metric in METRICS if metric.kind is Kind.HISTOGRAM]
    return "\n".join(parts) + "\n"


def _row(metric: Metric) -> str:
    labels = "; ".join(_label(name, values) for name, values in metric.labels.items())
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


def _label(name: str, values: tuple[str, ...]) -> str:
    return f"`{name}`: {', '.join(values)}" if values else f"`{name}`"


def _buckets(metric: Metric) -> str:
    return f"- `{metric.name}`: {', '.join(f'{bound:g}' for bound in metric.buckets)}"


if __name__ == "__main__":
    print(render(), end="")
