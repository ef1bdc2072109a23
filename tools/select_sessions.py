"""Makes the shipped traces from converted sources: a subset of sessions and, where none are recorded, arrivals.

    ampd trace convert tau-bench gpt-4o-airline.json.gz airline.jsonl --tokenizer qwen.tiktoken
    python -m tools.select_sessions airline.jsonl tau-bench-airline.jsonl --sessions 16 --max-context 2600 --rate 0.1

    ampd trace convert kv-cache-tester traces/ agents.jsonl
    python -m tools.select_sessions agents.jsonl coding-agents.jsonl --sessions 16 --max-context 40000 \
        --max-gap 600 --rate 0.02

    ampd trace convert toolbench data_example/answer answers.jsonl --tokenizer qwen.tiktoken
    python -m tools.select_sessions answers.jsonl toolbench-answers.jsonl --sessions 13 --max-context 8192 --rate 0.1
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg

from ampd.errors import guarded
from ampd.settings import Settings, parse_settings
from workloads.trace import Session, load_trace, retime, write_trace

FEWEST_ROUNDS = 3
"""Shorter sessions are left out."""


class SelectSettings(Settings):
    """Choose sessions of a converted trace and give them arrivals."""

    source: CliPositionalArg[str] = Field(description="Converted trace.")
    output: CliPositionalArg[Path] = Field(description="Trace to write.")
    sessions: int = Field(16, ge=1, description="How many sessions, evenly spread over those that fit.")
    max_context: int = Field(4096, ge=1, description="Longest context of a session in tokens.")
    max_gap: float = Field(
        float("inf"), allow_inf_nan=True, ge=0, description="Longest gap in seconds; sessions with longer ones are out."
    )
    rate: float = Field(1.0, gt=0, description="Poisson arrivals per second.")
    seed: int = Field(0, description="Seed of the arrivals.")


def run(argv: Sequence[str]) -> int:
    """Select and write; the sessions keep the source's order and every round as it is."""
    settings = parse_settings(SelectSettings, argv, "select")
    fitting = [session for session in load_trace(settings.source) if _fits(session, settings)]
    step = max(len(fitting) / settings.sessions, 1.0)
    chosen = [fitting[int(index * step)] for index in range(min(settings.sessions, len(fitting)))]
    rounded = (
        session.model_copy(update={"arrival_s": round(session.arrival_s, 3)})
        for session in retime(chosen, settings.rate, settings.seed, None)
    )
    return 0 if write_trace(rounded, settings.output) else 1


def _fits(session: Session, settings: SelectSettings) -> bool:
    return (
        len(session.rounds) >= FEWEST_ROUNDS
        and session.max_context_tokens <= settings.max_context
        and all(item.tool_s <= settings.max_gap for item in session.rounds)
    )


if __name__ == "__main__":
    sys.exit(guarded(lambda: run(sys.argv[1:])))
