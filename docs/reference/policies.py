"""The reference of all policies, written from the registry: `python -m docs.reference.policies > docs/policies.md`."""

from __future__ import annotations

import inspect

from ampd.policies.registry import Policy, of_kind

_HEAD = """\
# Policies

<!-- Written by: python -m docs.reference.policies > docs/policies.md -->

A policy is a pure function of one situation: a task, the views of the workers, the performance model, the time and a
random number generator. It is chosen by name, and the same object decides live and in simulation. In Python:
`ROUTING.create("ampd", alpha=0.8)`, from `ampd.policies.registry`. Each policy has a file of its name: ours and the
textbook baselines in `ampd/policies/KIND/`, those of other systems in `ampd/policies/rivals/`.
[own-policy.md](own-policy.md) shows how to add a policy of your own.
"""

_KINDS = {
    "binding": "Which decode worker owns a new session.",
    "routing": "Where a round is prefilled: on the session's decode worker (local) or on a prefill worker (remote).",
    "ordering": "Which waiting prefill of a queue runs next.",
    "slicing": "How a prefill on a decode worker shares the worker with the batch that decodes there.",
    "pools": "Which role each worker has.",
}


def render() -> str:
    """The reference as Markdown."""
    parts = [_HEAD]
    for kind, summary in _KINDS.items():
        parts.append(f"## {kind.capitalize()}\n\n{summary}\n")
        registry = of_kind(kind)
        parts.extend(_section(kind, name, registry.policy(name)) for name in registry.names())
    return "\n".join(parts)


def _section(kind: str, name: str, policy: type[Policy]) -> str:
    lines = [f"### {kind}: {name}", "", inspect.getdoc(policy) or "", ""]
    if not policy.model_fields:
        return "\n".join([*lines, "No parameters.", ""])
    lines += ["| parameter | type | default | |", "| --- | --- | --- | --- |"]
    for key, field in policy.model_fields.items():
        kind_of_value = _cell(inspect.formatannotation(field.annotation))
        lines.append(f"| `{key}` | {kind_of_value} | {field.default} | {field.description} |")
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    """As a cell of a table, in which a bar would end it."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(render(), end="")
