"""What the tests of the trace formats share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workloads.formats import LoadOptions, load_sessions
from workloads.trace import Session

NOTES: list[str] = []


def words(text: str) -> int:
    """A tokenizer for tests: one token per word."""
    return len(text.split())


def load(name: str, path: Path, *, with_text: bool = False) -> list[Session]:
    NOTES.clear()
    return list(load_sessions(name, path, LoadOptions(count_tokens=words, with_text=with_text, note=NOTES.append)))


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shape(session: Session) -> list[tuple[int, int, float, int | None]]:
    return [(r.incr_tokens, r.output_tokens, r.tool_s, r.keep_tokens) for r in session.rounds]


def say(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}
