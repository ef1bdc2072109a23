"""Policies by name: registration and creation.

A policy is a frozen pydantic model whose fields are its parameters, registered by a decorator:

    @register("routing", "always-local")
    class AlwaysLocal(Policy):
        \"\"\"Prefill every round on the session's decode worker.\"\"\"

        def route(self, situation: RoutingSituation) -> RouteDecision: ...

Modules of other packages take part in two ways. An entry point of the group `ampd.policies` names a module of an
installed package (`my_policies`), or a policy in it (`my_policies:BusyRemote`). The environment variable
`AMPD_POLICY_MODULES` names modules (`my_policies,others.routing`). Every process of a graph imports them beside the
built-in ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module, metadata
from pkgutil import walk_packages
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

import ampd.policies
from ampd.documents import first_problem
from ampd.errors import UserError, did_you_mean
from ampd.policies.base import (
    BindingPolicy,
    OrderingPolicy,
    PoolsPolicy,
    RoutingPolicy,
    SlicingPolicy,
    parse_named,
)

Kind = Literal["binding", "routing", "ordering", "slicing", "pools"]

KINDS: tuple[Kind, ...] = get_args(Kind)

MODULES_VARIABLE = "AMPD_POLICY_MODULES"
"""Environment variable: the user's own modules with policies, comma-separated."""

ENTRY_POINTS = "ampd.policies"
"""Group of the entry points that name modules with policies, or policies in them."""


class Policy(BaseModel):
    """Base of all policies: its fields, each with a description, are the policy's parameters.

    Attributes:
        policy_name: the name under which it is registered.
        is_idle: a pools policy that never changes a role.
    """

    # A compiled method is a callable object, and no function that pydantic would know as a method.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ignored_types=(Callable,))  # type: ignore[typeddict-item]

    policy_name: ClassVar[str] = ""
    is_idle: ClassVar[bool] = False
    help_note: ClassVar[str] = ""


PolicyT = TypeVar("PolicyT", bound=Policy)
InterfaceT = TypeVar("InterfaceT", covariant=True)


@dataclass(frozen=True)
class Registry(Generic[InterfaceT]):
    """The policies of one kind. `InterfaceT` is the interface that all of them have."""

    kind: Kind
    _policies: dict[str, type[Policy]] = field(default_factory=dict)

    def create(self, name: str, /, **parameters: Any) -> InterfaceT:
        """Make a policy from its name and parameters, as in `ROUTING.create("ampd", alpha=0.8)`.

        Raises:
            UserError: an unknown name or parameter (the known ones are listed), or a value that does not fit.
        """
        policy = self.policy(name)
        unknown = sorted(parameters.keys() - policy.model_fields.keys())
        if unknown:
            known = ", ".join(policy.model_fields) or "none, it takes no parameters"
            similar = did_you_mean(unknown[0], policy.model_fields)
            raise UserError(f"{self.kind} policy {name} has no parameter {unknown[0]!r}; known: {known}{similar}")
        try:
            made: Any = policy(**parameters)
        except ValidationError as error:
            raise UserError(f"{self.kind} policy {name}: {first_problem(error)}") from None
        return made  # type: ignore[no-any-return]

    def create_named(self, text: str, /, **parameters: Any) -> InterfaceT:
        """Make a policy from the user's text: `ampd`, or `ampd(alpha=0.8)`. Further `parameters` override the text's.

        Raises:
            UserError: as `create`, or the text has another form.
        """
        name, written = parse_named(text)
        return self.create(name, **{**written, **parameters})

    def names(self) -> tuple[str, ...]:
        """The known names, sorted."""
        _import_policies()
        return tuple(sorted(self._policies))

    def names_in_help(self) -> tuple[str, ...]:
        """The known names, sorted, with what a reader of `--help` must know of them."""
        notes = {name: self._policies[name].help_note for name in self.names()}
        return tuple(f"{name} ({note})" if note else name for name, note in notes.items())

    def policy(self, name: str) -> type[Policy]:
        """The class of a policy.

        Raises:
            UserError: the name is unknown; the known ones are listed.
        """
        names = self.names()
        if name not in names:
            known = ", ".join(names) + did_you_mean(name, names)
            raise UserError(f"unknown {self.kind} policy {name!r}; known: {known}")
        return self._policies[name]

    def add(self, name: str, policy: type[Policy]) -> None:
        """Make a policy known under a name.

        Raises:
            ValueError: another policy has the name.
        """
        known = self._policies.setdefault(name, policy)
        if (known.__module__, known.__qualname__) != (policy.__module__, policy.__qualname__):
            raise ValueError(f"{self.kind} policy {name!r} is registered twice: {known} and {policy}")


BINDING = Registry[BindingPolicy]("binding")
ROUTING = Registry[RoutingPolicy]("routing")
ORDERING = Registry[OrderingPolicy]("ordering")
SLICING = Registry[SlicingPolicy]("slicing")
POOLS = Registry[PoolsPolicy]("pools")

_REGISTRIES: dict[str, Registry[Any]] = {
    registry.kind: registry for registry in (BINDING, ROUTING, ORDERING, SLICING, POOLS)
}

NAMES: dict[str, Callable[[], tuple[str, ...]]] = {
    kind: registry.names_in_help for kind, registry in _REGISTRIES.items()
}
"""Kind -> the known names, for the help of the settings that name a policy."""


def register(kind: Kind, name: str) -> Callable[[type[PolicyT]], type[PolicyT]]:
    """Class decorator that makes a policy known under `name`.

    Raises:
        UserError: the kind is unknown.
        ValueError: another policy of this kind has the name.
    """

    def add(policy: type[PolicyT]) -> type[PolicyT]:
        of_kind(kind).add(name, policy)
        policy.policy_name = name
        return policy

    return add


def of_kind(kind: str) -> Registry[Any]:
    """The registry of a kind whose name is only known at run time.

    Raises:
        UserError: the kind is unknown.
    """
    if kind not in _REGISTRIES:
        raise UserError(f"unknown kind of policy {kind!r}; known: {', '.join(KINDS)}")
    return _REGISTRIES[kind]


def create(kind: str, name: str, /, **parameters: Any) -> Any:
    """Make a policy of any kind, as `Registry.create` does."""
    return of_kind(kind).create(name, **parameters)


def create_named(kind: str, text: str, /, **parameters: Any) -> Any:
    """Make a policy of any kind from the user's text, as `Registry.create_named` does."""
    return of_kind(kind).create_named(text, **parameters)


@cache
def _import_policies() -> None:
    # Policies import this module for `register`, so they can only be imported once it is complete.
    for module in walk_packages(ampd.policies.__path__, "ampd.policies."):
        import_module(module.name)
    for source, name, load in _own_modules():
        try:
            load()
        except Exception as error:  # a user's module may raise anything
            kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
            line = str(error).partition("\n")[0]
            raise UserError(f"{source}: cannot import {name!r}: {kind}{line}") from None


def _own_modules() -> Iterator[tuple[str, str, Callable[[], object]]]:
    """(where it is named, name, import) of each module with policies that is not part of this package."""
    for point in metadata.entry_points(group=ENTRY_POINTS):
        package = f" of {point.dist.name}" if point.dist else ""
        yield f"entry point {point.name!r}{package}", point.value, point.load
    for name in os.environ.get(MODULES_VARIABLE, "").split(","):
        if name := name.strip():
            yield MODULES_VARIABLE, name, partial(import_module, name)
