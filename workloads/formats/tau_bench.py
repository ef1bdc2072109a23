"""tau-bench results: `[{task_id, trial, traj: [messages]}]`; every assistant message is one round."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workloads.formats.loader import LoadOptions, register
from workloads.formats.messages import ChatCall, leading_system, message_words, rounds_from_chat, shared_prefix_of
from workloads.formats.source import as_list, as_object, file_stem, read_json, source_files
from workloads.trace import Session


@register("tau-bench", "tau-bench trajectories (messages; no times: every gap and arrival is 0)")
def load(path: Path, options: LoadOptions) -> Iterator[Session]:
    """One session per trajectory. Tool schemas are not in the files, so the prompts lack them."""
    files = source_files(path, ".json")
    for file in files:
        prefix = f"{file_stem(file)}-" if len(files) > 1 else ""
        for index, entry in enumerate(as_list(read_json(file), str(file))):
            where = f"{file}: entry {index}"
            run = as_object(entry, where)
            calls = _calls(as_list(run.get("traj"), f"{where}: traj"), where)
            if not calls:
                options.note(f"{where}: no assistant message, left out")
                continue
            yield Session(
                session_id=f"{prefix}{run.get('task_id', index)}-{run.get('trial', 0)}",
                arrival_s=0.0,
                rounds=rounds_from_chat(calls, options, where),
                shared_prefix=shared_prefix_of(calls[0], options),
            )


def _calls(messages: list[Any], where: str) -> list[ChatCall]:
    calls: list[ChatCall] = []
    before: list[str] = []
    system = leading_system([as_object(message, where) for message in messages])
    for message in messages:
        words = message_words(message)
        if message.get("role") == "assistant" and before:
            calls.append(ChatCall(messages=tuple(before), output=words, system_messages=system))
        before.append(words)
    return calls
