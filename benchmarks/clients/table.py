"""The table of benchmarks/results/clients.csv: a row per client and feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One feature of one client.

    Attributes:
        before: how it failed before it was fixed; empty: it never did.
        error: empty if it works.
        is_session: the graph knew the row's session; None: not asked.
        figures: what was measured.
        fault: the section of docs/dynamo-known.md that describes why the feature fails; empty: it does not.
    """

    client: str
    feature: str
    before: str
    error: str
    is_session: bool | None = None
    figures: str = ""
    fault: str = ""

    @property
    def state(self) -> str:
        """How it goes now."""
        works = f"works: {self.figures}" if self.figures else "works"
        if self.fault:
            works = f"fails, [Dynamo](dynamo-known.md#{self.fault})"
        return self.error or works


def table(rows: Sequence[Row], versions: Mapping[str, str]) -> str:
    """The rows as Markdown."""
    lines = ["| client | version | feature | before | now | session |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        session = "" if row.is_session is None else "known" if row.is_session else "**none**"
        state, version = row.state.replace("|", "\\|"), versions.get(row.client, "")
        lines.append(f"| {row.client} | {version} | {row.feature} | {row.before} | {state} | {session} |")
    return "\n".join(lines)
