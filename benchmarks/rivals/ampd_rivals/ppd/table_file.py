"""The file of a routing table: a readable JSON document with a route, local or remote, for every bucket of rounds.

A bucket is a range of context, increment, expected output and load. `*_from` lists where the ranges of an axis begin:
with `[0, 1, 1500]` they are 0, 1 to 1499, and 1500 or more. A row has the route of every range of load, in order.
"""

from __future__ import annotations

from bisect import bisect_right
from importlib.resources import files
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from ampd.documents import first_problem, read_document
from ampd.errors import UserError
from ampd.types import Route

DEFAULT_TABLE = Path(str(files("ampd_rivals.ppd"))) / "tables" / "default.json"
"""The table that comes with the package."""

Tokens = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TableRow(_Part):
    """The routes of one bucket of context, increment and output, by load."""

    context_tokens_from: Tokens
    increment_tokens_from: Tokens
    output_tokens_from: Tokens
    by_load: tuple[Route, ...]


class RoutingTable(_Part):
    """Local or remote for every bucket of rounds. The axes and rows are checked to fit each other.

    Cells are numbered with the load running fastest, then output, increment, context.
    """

    format: Literal["ampd-routing-table/1"] = "ampd-routing-table/1"
    fitted_on: dict[str, Any] | None = Field(
        None, description="Origin of the table, for readers; null: written by hand."
    )
    expected_output_tokens: float = Field(gt=0, description="Estimate of every round's output length, in tokens.")
    context_tokens_from: tuple[Tokens, ...] = Field(description="Context whose KV the decode worker holds, in tokens.")
    increment_tokens_from: tuple[Tokens, ...] = Field(description="New tokens to prefill.")
    output_tokens_from: tuple[Tokens, ...] = Field(description="Expected output, in tokens.")
    load_from: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        description="Queued prefill time of the prefill worker with the least of it, over the round's TTFT target."
    )
    rows: tuple[TableRow, ...]

    _routes: tuple[Route, ...] = PrivateAttr(default=())

    @field_validator("context_tokens_from", "increment_tokens_from", "output_tokens_from", "load_from")
    @classmethod
    def _ascending(cls, starts: tuple[float, ...]) -> tuple[float, ...]:
        if not starts or starts[0] != 0 or any(later <= earlier for earlier, later in pairwise(starts)):
            raise ValueError(f"must begin with 0 and grow: {list(starts)}")
        return starts

    @model_validator(mode="after")
    def _complete(self) -> RoutingTable:
        rows: dict[tuple[int, int, int], tuple[Route, ...]] = {}
        for row in self.rows:
            key = (row.context_tokens_from, row.increment_tokens_from, row.output_tokens_from)
            if key in rows:
                raise ValueError(f"rows: two for context, increment, output from {list(key)} tokens")
            if len(row.by_load) != len(self.load_from):
                raise ValueError(
                    f"rows: by_load from {list(key)} tokens has {len(row.by_load)} routes for "
                    f"{len(self.load_from)} ranges of load"
                )
            rows[key] = row.by_load
        keys = self.buckets()
        missing, unknown = [key for key in keys if key not in rows], rows.keys() - set(keys)
        if missing:
            raise ValueError(f"rows: none for context, increment, output from {list(missing[0])} tokens")
        if unknown:
            raise ValueError(f"rows: {list(min(unknown))} is no bucket of the axes")
        self._routes = tuple(route for key in keys for route in rows[key])
        return self

    @property
    def routes(self) -> tuple[Route, ...]:
        return self._routes

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (
            len(self.context_tokens_from),
            len(self.increment_tokens_from),
            len(self.output_tokens_from),
            len(self.load_from),
        )

    def buckets(self) -> list[tuple[int, int, int]]:
        """First context, increment and output of every row, in the order of the cells."""
        return list(product(self.context_tokens_from, self.increment_tokens_from, self.output_tokens_from))

    def cell(self, context_tokens: int, increment_tokens: int, output_tokens: float, load: float) -> int:
        """Number of the cell that a round falls into."""
        number = bisect_right(self.context_tokens_from, context_tokens) - 1
        number = number * len(self.increment_tokens_from) + bisect_right(self.increment_tokens_from, increment_tokens)
        number = (number - 1) * len(self.output_tokens_from) + bisect_right(self.output_tokens_from, output_tokens)
        return (number - 1) * len(self.load_from) + bisect_right(self.load_from, load) - 1


def read_table(path: Path) -> RoutingTable:
    """Read and check a file.

    Raises:
        UserError: the file cannot be read or a field is wrong, as one line with the file and the field.
    """
    return read_document(RoutingTable, path, "routing table", quotes_rules=False)


def parse_table(document: Any) -> RoutingTable:
    """Check a table that is given as a JSON object.

    Raises:
        UserError: a field is wrong, as one line.
    """
    try:
        return RoutingTable.model_validate(document)
    except ValidationError as error:
        raise UserError(f"routing table: {first_problem(error, quotes_rules=False)}") from None
