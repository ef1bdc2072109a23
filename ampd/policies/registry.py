"""The one place where policies are found by name: registration, creation, and what a person may know of each.

A policy is a frozen pydantic model whose fields are its parameters, registered by a decorator:

    @register("routing", "always-local")
    class AlwaysLocal(Policy):
        \"\"\"Prefill every round on the session's decode worker.\"\"\"

        def route(self, task, decode, prefill, model, now_s, rng): ...

Modules outside of this package take part if the environment variable `AMPD_POLICY_MODULES` names them
(`my_policies,others.routing`): every process of a graph imports them beside the built-in ones.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, Literal, TypeVar, overload

from pydantic import BaseModel, ConfigDict, ValidationError

from ampd.errors import UserError
from ampd.policies.base import BindingPolicy, OrderingPolicy, PoolsPolicy, RoutingPolicy, SlicingPolicy
from ampd.policies.naming import parse_named

Kind = Literal["binding", "routing", "ordering", "slicing", "pools"]

KINDS: tuple[Kind, ...] = ("binding", "routing", "ordering", "slicing", "pools")

MODULES_VARIABLE = "AMPD_POLICY_MODULES"
"""Environment variable: modules with policies of one's own, comma-separated."""

_BUILT_IN = (
    "ampd.policies.binding.least_kv",
    "ampd.policies.rivals.arrow.binding",
    "ampd.policies.binding.predictive",
    "ampd.policies.routing.ampd",
    "ampd.policies.rivals.arrow.routing",
    "ampd.policies.rivals.deflection",
    "ampd.policies.rivals.first_remote",
    "ampd.policies.routing.always",
    "ampd.policies.rivals.laps.routing",
    "ampd.policies.routing.predictive",
    "ampd.policies.rivals.ppd.routing",
    "ampd.policies.rivals.threshold",
    "ampd.policies.ordering.fcfs",
    "ampd.policies.ordering.ampd",
    "ampd.policies.rivals.laps.ordering",
    "ampd.policies.ordering.on_time",
    "ampd.policies.rivals.ranked",
    "ampd.policies.rivals.continuum",
    "ampd.policies.slicing.whole",
    "ampd.policies.rivals.itl_chunks",
    "ampd.policies.slicing.slack",
    "ampd.policies.pools.static",
    "ampd.policies.rivals.arrow.pools",
    "ampd.policies.rivals.laps.pools",
    "ampd.policies.pools.predictive",
)


class Policy(BaseModel):
    """Base of all policies: its fields, each with a description, are the policy's parameters.

    Attributes:
        is_idle: a pools policy that never changes a role.
        is_whole: a slicing policy that computes every prefill in one slice.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    is_idle: ClassVar[bool] = False
    is_whole: ClassVar[bool] = False


PolicyT = TypeVar("PolicyT", bound=Policy)

_POLICIES: dict[Kind, dict[str, type[Policy]]] = {kind: {} for kind in KINDS}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a policy, for flags and documentation."""

    name: str
    type: str
    default: Any
    description: str


@dataclass(frozen=True, slots=True)
class Description:
    """A registered policy as a person should see it. `text` is its docstring: what it reads, limits, an example."""

    kind: Kind
    name: str
    text: str
    parameters: tuple[Parameter, ...]


def register(kind: Kind, name: str) -> Callable[[type[PolicyT]], type[PolicyT]]:
    """Class decorator that makes a policy known under `name`.

    Raises:
        ValueError: another policy of this kind has the name.
    """

    def add(policy: type[PolicyT]) -> type[PolicyT]:
        known = _POLICIES[kind].setdefault(name, policy)
        if (known.__module__, known.__qualname__) != (policy.__module__, policy.__qualname__):
            raise ValueError(f"{kind} policy {name!r} is registered twice: {known} and {policy}")
        return policy

    return add


@overload
def create(kind: Literal["binding"], name: str, /, **parameters: Any) -> BindingPolicy: ...
@overload
def create(kind: Literal["routing"], name: str, /, **parameters: Any) -> RoutingPolicy: ...
@overload
def create(kind: Literal["ordering"], name: str, /, **parameters: Any) -> OrderingPolicy: ...
@overload
def create(kind: Literal["slicing"], name: str, /, **parameters: Any) -> SlicingPolicy: ...
@overload
def create(kind: Literal["pools"], name: str, /, **parameters: Any) -> PoolsPolicy: ...
@overload
def create(kind: str, name: str, /, **parameters: Any) -> Policy: ...
def create(kind: str, name: str, /, **parameters: Any) -> Any:
    """Make a policy from its name and parameters, as in `create("routing", "ampd", alpha=0.8)`.

    Raises:
        UserError: an unknown kind, name or parameter (the known ones are listed), or a value that does not fit.
    """
    policies = _of_kind(kind)
    if name not in policies:
        raise UserError(f"unknown {kind} policy {name!r}; known: {', '.join(sorted(policies))}")
    policy = policies[name]
    unknown = sorted(parameters.keys() - policy.model_fields.keys())
    if unknown:
        known = ", ".join(policy.model_fields) or "none, it takes no parameters"
        raise UserError(f"{kind} policy {name} has no parameter {unknown[0]!r}; known: {known}")
    try:
        return policy(**parameters)
    except ValidationError as error:
        detail = error.errors()[0]
        field = ".".join(str(part) for part in detail["loc"])
        raise UserError(f"{kind} policy {name}: {field}: {detail['msg']} (given: {detail['input']!r})") from None


@overload
def create_named(kind: Literal["binding"], text: str, /, **parameters: Any) -> BindingPolicy: ...
@overload
def create_named(kind: Literal["routing"], text: str, /, **parameters: Any) -> RoutingPolicy: ...
@overload
def create_named(kind: Literal["ordering"], text: str, /, **parameters: Any) -> OrderingPolicy: ...
@overload
def create_named(kind: Literal["slicing"], text: str, /, **parameters: Any) -> SlicingPolicy: ...
@overload
def create_named(kind: Literal["pools"], text: str, /, **parameters: Any) -> PoolsPolicy: ...
@overload
def create_named(kind: str, text: str, /, **parameters: Any) -> Policy: ...
def create_named(kind: str, text: str, /, **parameters: Any) -> Any:
    """Make a policy from what a person wrote: `ampd`, or `ampd(alpha=0.8)`; further `parameters` come on top.

    Raises:
        UserError: as `create`, or the text has another form.
    """
    name, written = parse_named(text)
    return create(kind, name, **{**written, **parameters})


def names(kind: str) -> tuple[str, ...]:
    """The known names of one kind, sorted."""
    return tuple(sorted(_of_kind(kind)))


def describe(kind: str, name: str) -> Description:
    """What there is to know of one policy.

    Raises:
        UserError: the kind or the name is unknown.
    """
    policy = type(create(kind, name))
    parameters = tuple(
        Parameter(key, inspect.formatannotation(field.annotation), field.default, field.description or "")
        for key, field in policy.model_fields.items()
    )
    return Description(_known_kind(kind), name, inspect.getdoc(policy) or "", parameters)


def _of_kind(kind: str) -> dict[str, type[Policy]]:
    _import_built_in()
    return _POLICIES[_known_kind(kind)]


def _known_kind(kind: str) -> Kind:
    for known in KINDS:
        if known == kind:
            return known
    raise UserError(f"unknown kind of policy {kind!r}; known: {', '.join(KINDS)}")


@cache
def _import_built_in() -> None:
    # Policies import this module for `register`, so they can only be imported once it is complete.
    for module in _BUILT_IN:
        import_module(module)
    for module in filter(None, (name.strip() for name in os.environ.get(MODULES_VARIABLE, "").split(","))):
        try:
            import_module(module)
        except Exception as error:  # whatever a module of the user's own raises
            kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
            line = str(error).partition("\n")[0]
            raise UserError(f"{MODULES_VARIABLE}: cannot import {module!r}: {kind}{line}") from None
