"""Engine outputs as Dynamo's chunks, and tasks as they come over the wire."""

from __future__ import annotations

from typing import Any

from ampd.types import PrefillTask, Slo
from ampd.wire import TaskMessage
from workers.engines.base import EngineOutput


def task_from_wire(message: TaskMessage, now_s: float) -> PrefillTask:
    """A task whose `arrival_s` counts back from `now_s` on this worker's clock."""
    return PrefillTask(
        task_id=message["task_id"],
        session_id=message["session_id"],
        hist_tokens=message["hist_tokens"],
        incr_tokens=message["incr_tokens"],
        arrival_s=now_s - message["waited_s"],
        slo=Slo(ttft_s=message["ttft_s"], itl_s=message["itl_s"]),
        session_missed=message.get("session_missed", False),
    )


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
