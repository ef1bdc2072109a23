"""Writes the files of fitted routing tables, which the routing `table` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ampd_rivals.ppd.table_file import RoutingTable
from pydantic import BaseModel, ConfigDict, Field

from ampd.documents import write_document
from ampd.types import Route


class FittedOn(BaseModel):
    """The data that a table was fitted on, and the rounds that it attained there."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    trace: str = Field(min_length=1, description="Name or file name of the trace.")
    sessions: int = Field(ge=1, description="Sessions of one simulation.")
    performance_model: str = Field(min_length=1, description="Name of the performance model.")
    model: str = Field(description="The language model.")
    gpu: str = Field(description="The accelerator.")
    cluster: str = Field(description="Replicas and their tensor parallelism.")
    binding: str = Field(description="Binding policy.")
    ordering: str = Field(description="Ordering policy.")
    slicing: str = Field(description="Slicing policy.")
    ttft_slo_s: float = Field(gt=0, description="TTFT target in seconds.")
    itl_slo_s: float = Field(gt=0, description="ITL target in seconds.")
    rates_per_s: tuple[float | None, ...] = Field(description="Session arrivals per second; null: the trace's own.")
    output_scales: tuple[float, ...] = Field(description="Factors on the trace's output lengths, one fit each.")
    seed: int = Field(description="Seed of arrivals and of random choices.")
    rounds_attained: dict[str, int] = Field(
        default_factory=dict,
        description="Rounds within both targets, of `rounds` in all: with this table, and with every round on one "
        "route; `fresh_...`: the same for arrivals that the fit has not seen.",
    )


def with_routes(table: RoutingTable, routes: tuple[Route, ...]) -> RoutingTable:
    """The same buckets with other routes, one for every cell."""
    loads = len(table.load_from)
    rows = [
        {
            "context_tokens_from": context,
            "increment_tokens_from": increment,
            "output_tokens_from": output,
            "by_load": routes[number * loads : (number + 1) * loads],
        }
        for number, (context, increment, output) in enumerate(table.buckets())
    ]
    return RoutingTable.model_validate(dict(table) | {"rows": rows})


def write_table(table: RoutingTable, path: Path) -> None:
    """Write a file that `read_table` reads back equal, one row per line; an existing file is replaced only as a whole.

    Raises:
        UserError: the file cannot be written.
    """
    write_document(dump_table(table), path, "routing table")


def dump_table(table: RoutingTable) -> str:
    """The table as readable JSON: one line per axis and row."""
    document = table.model_dump(mode="json")
    rows = document.pop("rows")
    lines = [f" {json.dumps(key)}: {_block(value)}," for key, value in document.items()]
    lines += [' "rows": [', ",\n".join(f"  {json.dumps(row)}" for row in rows), " ]"]
    return "\n".join(["{", *lines, "}"]) + "\n"


def _block(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = ",\n".join(f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items())
    return "{\n" + inner + "\n }"
