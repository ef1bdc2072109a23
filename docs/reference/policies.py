"""The reference of all policies, written from the registry: `python -m docs.reference.policies > docs/policies.md`."""

from __future__ import annotations

from ampd.policies.registry import Description, of_kind

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
        parts.extend(_section(registry.describe(name)) for name in registry.names())
    return "\n".join(parts)


def _section(policy: Description) -> str:
    lines = [f"### {policy.kind}: {policy.name}", "", policy.text, ""]
    if policy.parameters:
        lines += ["| parameter | type | default | |", "| --- | --- | --- | --- |"]
        lines += [f"| `{p.name}` | {_cell(p.type)} | {p.default} | {p.description} |" for p in policy.parameters]
    else:
        lines += ["No parameters."]
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    """As a cell of a table, in which a bar would end it."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(render(), end="")
