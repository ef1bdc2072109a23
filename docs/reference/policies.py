"""The reference of all policies, written from the registry: `python -m docs.reference.policies > docs/policies.md`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from ampd.policies.registry import Policy, of_kind

RIVALS = "ampd_rivals."
"""Modules of the rivals' package begin so."""

_HEAD = """\
# Policies

<!-- Written by: python -m docs.reference.policies > docs/policies.md -->

A policy is a pure function of one situation: a task, the views of the workers, the performance model, the time and a
random number generator. It is chosen by name, and the same object decides live and in simulation. In Python:
`ROUTING.create("ampd", alpha=0.8)`, from `ampd.policies.registry`. Each policy has a file of its name in
`ampd/policies/KIND/`. LAPS and Arrow have policies of several kinds in `ampd/policies/`.
[own-policy.md](own-policy.md) shows how to add a policy of your own.

The package `ampd-rivals` brings policies of other systems and textbook orderings to compare with:
{rivals}. Their names work where the package is installed: by `make` in a checkout, elsewhere by
`pip install benchmarks/rivals` in AMPD's repository. [Its page](../benchmarks/rivals/README.md) describes them.
"""

_KINDS = {
    "binding": "Which decode worker owns a new session.",
    "routing": "Where a round is prefilled: on the session's decode worker (local) or on a prefill worker (remote).",
    "ordering": "Which waiting prefill of a queue runs next.",
    "slicing": "What the engine of a worker computes in its next pass: prefills, a step of the decode batch, or both.",
    "pools": "Which role each worker has.",
}


def render() -> str:
    """The reference of the product's own policies as Markdown."""
    rivals = {f"`{name}`" for kind in _KINDS for name in of_kind(kind).names() if _is_rival(of_kind(kind).policy(name))}
    return "\n".join([_HEAD.format(rivals=", ".join(sorted(rivals))), *rendered_kinds(are_rivals=False)])


def rendered_kinds(*, are_rivals: bool) -> Iterator[str]:
    """A section for each kind of policy, with the product's own ones or with those of the rivals' package."""
    for kind, summary in _KINDS.items():
        registry = of_kind(kind)
        policies = {name: registry.policy(name) for name in registry.names()}
        chosen = {name: policy for name, policy in policies.items() if _is_rival(policy) is are_rivals}
        if chosen:
            yield f"## {kind.capitalize()}\n\n{summary}\n"
            yield from (_section(kind, name, policy) for name, policy in chosen.items())


def _is_rival(policy: type[Policy]) -> bool:
    return policy.__module__.startswith(RIVALS)


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
