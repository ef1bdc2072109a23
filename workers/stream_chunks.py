"""Engine outputs as Dynamo's chunks."""

from __future__ import annotations

from typing import Any

from workers.engines.base import EngineOutput


def chunk_of(output: EngineOutput) -> dict[str, Any]:
    """One output as the frontend expects it; the last one of a choice carries reason and usage."""
    chunk: dict[str, Any] = {"token_ids": output.token_ids, "index": output.index}
    if output.log_probs is not None:
        chunk["log_probs"] = output.log_probs
    if output.top_logprobs is not None:
        chunk["top_logprobs"] = output.top_logprobs
    if output.finish_reason is not None:
        chunk["finish_reason"] = output.finish_reason
        if output.stop_reason is not None:
            chunk["stop_reason"] = output.stop_reason
        chunk["completion_usage"] = usage_of(output)
    return chunk


def usage_of(output: EngineOutput) -> dict[str, Any]:
    """Token counts of a call, as the engine saw it."""
    return {
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": output.completion_tokens,
        "total_tokens": output.prompt_tokens + output.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": output.cached_tokens},
    }
