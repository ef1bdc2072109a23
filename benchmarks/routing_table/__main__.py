"""Writes the table for `--routing table` that serves a trace best on a cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from ampd.documents import check_writable
from ampd.errors import UserError, guarded
from ampd.policies.registry import create_named
from ampd.settings import parse_settings
from benchmarks.routing_table.case import FitCase
from benchmarks.routing_table.search import Fit, fit_table
from benchmarks.routing_table.table_file import FittedOn, dump_table, write_table
from planner.case_settings import CaseSettings
from planner.simulate_command import parse_rates
from planner.simulator.options import Cluster, SimulationOptions
from workloads.trace import load_trace

PROG = "python -m benchmarks.routing_table"


class TableFitSettings(CaseSettings):
    """Fit a routing table (local or remote by context, increment, expected output and load) by simulation."""

    prefill: str = Field("1xTP1", description="Prefill replicas, as 2xTP4 or 2xTP4,1xTP8.")
    decode: str = Field("1xTP1", description="Decode replicas, as 2xTP4 or 2xTP4,1xTP8.")
    ordering: str = Field("ampd", description="Ordering policy.")
    slicing: str = Field("whole", description="Slicing policy.")
    binding: str = Field("least-kv", description="Binding policy.")
    rate: str | None = Field(
        None,
        description="Session arrivals per second (Poisson), comma-separated: the table is fitted to all of them "
        "together; default: the trace's own arrivals.",
    )
    limit: int | None = Field(150, ge=1, description="Sessions of one simulation; with --rate the trace is repeated.")
    output_scales: str = Field(
        "1",
        description="Factors on the trace's output lengths, comma-separated, as 0.25,1,4: a fit and a range of "
        "expected output for each.",
    )
    steps: int = Field(150, ge=1, description="Most tables to try from each of the two starts.")
    jobs: int | None = Field(None, ge=1, description="Processes; default: one per core.")
    output: Path | None = Field(None, description="Table file to write; default: it is printed.")

    def case(self) -> FitCase:
        """What the flags describe.

        Raises:
            UserError: they do not fit together, or a name or file is unknown.
        """
        model = self.performance_model()
        cluster = Cluster(
            prefill=self.group(self.prefill, "--prefill", model),
            decode=self.group(self.decode, "--decode", model),
            max_context_tokens=model.profile.max_context_tokens or 0,
        )
        for flag, groups in (("--prefill", cluster.prefill), ("--decode", cluster.decode)):
            if not groups:
                raise UserError(f"{flag}: a table chooses between two kinds of workers; give replicas, as in 1xTP4")
        model.require([group.parallelism for group in cluster.prefill], [group.parallelism for group in cluster.decode])
        create_named("ordering", self.ordering)
        create_named("slicing", self.slicing)
        create_named("binding", self.binding)
        return FitCase(
            sessions=tuple(load_trace(self.trace)),
            cluster=cluster,
            model=model,
            slo=self.slo,
            rates=tuple(parse_rates(self.rate)),
            limit=self.limit,
            binding=self.binding,
            ordering=self.ordering,
            slicing=self.slicing,
            output_scales=parse_scales(self.output_scales),
            options=SimulationOptions(seed=self.seed),
            steps=self.steps,
        )


def run(argv: Sequence[str]) -> int:
    """Fit and write.

    Raises:
        UserError: wrong flags, an unknown name, a trace that cannot be read, a file that cannot be written.
    """
    settings = parse_settings(TableFitSettings, argv, PROG)
    check_writable(settings.output)
    case = settings.case()
    fit = fit_table(case, settings.jobs)
    table = fit.table.model_copy(
        update={"fitted_on": fitted_on(case, fit, Path(settings.trace).name).model_dump(mode="json")}
    )
    print(summary(fit), file=sys.stderr)
    if settings.output is None:
        print(dump_table(table), end="")
    else:
        write_table(table, settings.output)
    return 0


def parse_scales(text: str) -> tuple[float, ...]:
    """Factors of a comma-separated list, ascending.

    Raises:
        UserError: a part is no positive number.
    """
    try:
        scales = sorted(float(part) for part in text.split(","))
    except ValueError:
        scales = []
    if not scales or not all(0 < scale < float("inf") for scale in scales):
        raise UserError(f"--output-scales: give positive factors, as 0.25,1,4 (given: {text!r})")
    return tuple(scales)


def fitted_on(case: FitCase, fit: Fit, trace: str) -> FittedOn:
    """The provenance of a table."""
    source = case.model.provenance
    workload = case.workloads(1, case.options.seed, case.rates[:1])[0]
    return FittedOn(
        trace=trace,
        sessions=len(workload),
        performance_model=Path(case.model.name).name,
        model=source.model,
        gpu=source.gpu,
        cluster=str(case.cluster),
        binding=case.binding,
        ordering=case.ordering,
        slicing=case.slicing,
        ttft_slo_s=case.slo.ttft_s,
        itl_slo_s=case.slo.itl_s,
        rates_per_s=case.rates,
        output_scales=case.output_scales,
        seed=case.options.seed,
        rounds_attained=fit.rounds_attained,
    )


def summary(fit: Fit) -> str:
    """What the table attains beside every round on one route, a line for the arrivals of the fit and for fresh ones."""
    counts = fit.rounds_attained
    lines = []
    for prefix, what in (("", "fitted"), ("fresh_", "fresh")):
        if prefix + "table" in counts:
            parts = [
                f"{name.replace('_', ' ')} {counts[prefix + name]}" for name in ("table", "all_remote", "all_local")
            ]
            lines.append(f"table: rounds attained of {counts['rounds']}, {what} arrivals: {', '.join(parts)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(guarded(lambda: run(sys.argv[1:])))
