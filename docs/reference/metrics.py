"""The reference of all metrics, written from `names`: `python -m docs.reference.metrics > docs/metrics.md`."""

from __future__ import annotations

from ampd.telemetry.metrics.names import METRICS, Metric, Process

_HEAD = """\
# Metrics

<!-- Written by: python -m docs.reference.metrics > docs/metrics.md -->

Coordinators and workers expose Prometheus metrics on Dynamo's system port, beside Dynamo's own (`dynamo_component_*`)
and with its labels: `dynamo_namespace`, `dynamo_component`, `dynamo_endpoint`, `worker_id` (the process's instance id
in hexadecimal; coordinators have one too), `model`, `model_name`. The frontend has Dynamo's metrics
(`dynamo_frontend_*`) at its HTTP port. No label names a session, a request or a peer; each takes its values from a
fixed, small set. A `reason` of a policy keeps its name if it is plain words with hyphens, for the first 64 reasons.
Others count as `other`.

## Where

`DYN_SYSTEM_PORT` of a process is the port of `/metrics`, `/health` and `/live`: 1 to 32767 (Dynamo reads it as a signed
16-bit number), 0 for any free one, -1 for none (the default). `DYN_SYSTEM_HOST` is the address, by default all. If the
port is taken, the process serves without metrics and logs one line. Any other value is refused at the start.

`ampd serve` gives every process its own port and writes them to `metrics.json` among the logs, which Prometheus can
read (`--no-metrics` opens none):

```yaml
scrape_configs:
  - job_name: ampd
    file_sd_configs: [{files: [/path/to/logs/metrics.json]}]
```

## Health

`/health` and `/live` give the same answer, as in all of Dynamo: 200 when this process can do its work, 503 before that.

- A worker is healthy when its engine has started and its endpoints are served, until its engine is lost for good.
- A coordinator is healthy when it has connected to the shared state, with or without a decode worker.
- Neither becomes unhealthy when Redis is lost, because both serve without it. `ampd_state_available` shows the loss.

Dynamo's own threads answer there, also while the event loop of a coordinator or worker is blocked. The event loop
itself answers at `/engine/live` of the same port, with 200, or not at all.

On Kubernetes use `/live` for startup probes and `/health` for readiness. For liveness use `/engine/live` of
coordinators and workers, and `/live` of frontends. Give a liveness probe 4 s and six failures, as the manifests do. The
startup probe of a worker must allow for the loading of its model.

## Attainment

The share of rounds that met both their targets:

```promql
sum(rate(ampd_rounds_total{outcome="met"}[5m])) / sum(rate(ampd_rounds_total{outcome!="abandoned"}[5m]))
```

A round counts against the targets in its request if there are any, else against the `ampd_slo_*` defaults. ITL is the
mean of a round. `ampd_token_gap_seconds` has the single gaps as they leave the engine.
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
    return "\n".join(parts)


def _row(metric: Metric) -> str:
    labels = "; ".join(_label(name, values) for name, values in metric.labels.items())
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


def _label(name: str, values: tuple[str, ...]) -> str:
    return f"`{name}`: {', '.join(values)}" if values else f"`{name}`"


if __name__ == "__main__":
    print(render(), end="")
