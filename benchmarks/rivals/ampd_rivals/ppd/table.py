"""Routing by a table that was fitted offline, after PPD (arXiv 2603.13358)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, field_validator

from ampd.policies.base import RoutingSituation
from ampd.policies.estimates import NO_PREFILL_WORKER, able, least_queued, local
from ampd.policies.registry import Policy, register
from ampd.types import PrefillTask, Route, RouteDecision, RouteEstimate
from ampd_rivals.ppd.table_file import DEFAULT_TABLE, RoutingTable, parse_table, read_table


@register("routing", "table")
class TableRouting(Policy):
    """Look up in a table whether rounds of this kind are prefilled locally or remotely (PPD, fitted by simulation).

    Reads: history, increment and TTFT target of the round; queue, held prefix and longest context of every prefill
    worker; prefill and transfer times of the performance model; the table.

    Rule: the table has a route for every bucket of

    - context: tokens of history that the decode worker holds (an initial prefill has 0);
    - increment: tokens to prefill;
    - output: `output_tokens`, or the table's own estimate, which is the mean over the rounds it was fitted on. It is
      the same for every round, because the length of this round's output is not known;
    - load: the least queued prefill time among the prefill workers, divided by the round's TTFT target.

    A remote round goes to the prefill worker with the least queued work (of equals a random one). Reasons `table-local`
    and `table-remote`; the estimates of all prefill workers are recorded. Without a prefill worker that can take the
    prompt: local, `no-prefill-worker`.

    Tables are made by `python -m benchmarks.routing_table`, for one trace, layout, performance model and pair of
    targets. The default is a small one, fitted on the shipped performance model `qwen3-32b-h20` with one prefill and
    one decode replica. The file names the data of its fit: `ppd/tables/default.json`.

    Limits: a table is only good for loads like the one it was fitted on. The load of the decode worker does not count.
    The rival's own table has the request rate as load, the true output length, a weighted sum of relative TTFT and TPOT
    as its aim, and leaves initial prefills remote. Ours has the load that a coordinator can see, and its aim is the
    rounds that meet both targets.

    Example: `--routing table`
    """

    table: str | RoutingTable = Field(
        "default", description="Path of a table file, a table itself (in Python), or `default`: the shipped one."
    )
    output_tokens: float | None = Field(
        None, gt=0, description="Estimate of every round's output in tokens; None: the table's own."
    )

    _table: RoutingTable = PrivateAttr()

    @field_validator("table", mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        return parse_table(value) if isinstance(value, Mapping) else value

    def model_post_init(self, context: Any, /) -> None:  # noqa: ARG002
        """Read the file, once."""
        if isinstance(self.table, RoutingTable):
            self._table = self.table
        else:
            self._table = read_table(DEFAULT_TABLE if self.table == "default" else Path(self.table))

    def cell(self, task: PrefillTask, remote: Sequence[RouteEstimate]) -> int:
        """Number of the table's cell for a round, given the estimates of its remote routes."""
        table, ttft_s = self._table, task.slo.ttft_s
        queue_s = min(estimate.queue_s for estimate in remote)
        load = queue_s / ttft_s if ttft_s > 0 else float("inf")
        output_tokens = table.expected_output_tokens if self.output_tokens is None else self.output_tokens
        return table.cell(task.hist_tokens, task.incr_tokens, output_tokens, load)

    def route(self, situation: RoutingSituation) -> RouteDecision:
        task, decode = situation.task, situation.decode
        workers = able(task, situation.prefill)
        if not workers:
            return local(decode, NO_PREFILL_WORKER)
        remote = least_queued(situation, workers, "table-remote")
        if self._table.routes[self.cell(task, remote.estimates)] is Route.LOCAL:
            return local(decode, "table-local", remote.estimates)
        return remote
