"""The HTML report of a replay: one file that needs nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ampd.errors import RunError
from ampd.types import Slo
from workloads.plots import COLOURS, plots
from workloads.results import RoundRecord
from workloads.table import format_bytes

_LATENCIES = {
    "ttft_s": "TTFT",
    "ttft_initial_s": "TTFT, initial prefill",
    "ttft_incremental_s": "TTFT, incremental prefill",
    "itl_s": "ITL",
    "e2e_s": "Round, end to end",
}


def write_report(path: Path, result: Mapping[str, Any], records: Sequence[RoundRecord]) -> None:
    """Write the report of a result (as `workloads.results.summarise` makes it) and its rounds.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        path.write_text(render_report(result, records), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from None


def render_report(result: Mapping[str, Any], records: Sequence[RoundRecord]) -> str:
    """The report as HTML."""
    slo = result["slo"]
    environment = Environment(
        loader=PackageLoader("workloads"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"ms": _ms, "share": _share, "bytes": format_bytes}
    routes = result["routes"]
    reasons = Counter((record.route, str(record.decision.get("reason", "-"))) for record in records if record.route)
    return environment.get_template("report.html.j2").render(
        result=result,
        settings=result.get("settings", {}),
        latencies={label: result[key] for key, label in _LATENCIES.items()},
        plots=plots(records, Slo(slo["ttft"], slo["itl"]) if slo else None),
        colours=COLOURS,
        routed=sum(routes.values()),
        reasons=[(route, reason, count) for (route, reason), count in reasons.most_common()],
        errors=Counter(record.error for record in records if record.error).most_common(10),
    )


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1e3:,.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
