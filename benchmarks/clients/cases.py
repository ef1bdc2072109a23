"""All rows of the table, and the scripted replies of their sessions."""

from __future__ import annotations

import json

from benchmarks.clients.adapters import ANTHROPIC, LITELLM
from benchmarks.clients.feature import session_of
from benchmarks.clients.frameworks import LANGGRAPH, LLAMA_INDEX, OPENAI_AGENTS, PYDANTIC_AI, SMOLAGENTS
from benchmarks.clients.openai_client import OPENAI
from benchmarks.clients.vercel import VERCEL

CLIENTS = (OPENAI, OPENAI_AGENTS, LANGGRAPH, SMOLAGENTS, PYDANTIC_AI, LLAMA_INDEX, LITELLM, ANTHROPIC, VERCEL)


def replies() -> str:
    """The scripted replies of all rows, as `ampd serve --replies` reads them."""
    lines = [
        json.dumps({"session": session_of(client, feature), **reply})
        for client in CLIENTS
        for feature in client.features
        for reply in (*feature.replies, *([feature.guided] if feature.guided else []))
    ]
    return "\n".join(lines) + "\n"
