import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ampd.errors import UserError
from ampd.policies import registry
from ampd.policies.ordering.ampd import AmpdOrdering
from ampd.policies.routing.ampd import AmpdRouting
from docs.reference import policies, rivals


def test_every_kind_has_its_built_in_policies() -> None:
    assert {"arrow", "least-kv"} <= set(registry.BINDING.names())
    assert {"ampd", "always-local", "always-remote"} <= set(registry.ROUTING.names())
    assert {"ampd", "fcfs"} <= set(registry.ORDERING.names())


def test_defaults_are_the_papers() -> None:
    assert registry.create("routing", "ampd") == AmpdRouting(alpha=0.9, beta=0.85)
    assert registry.create("ordering", "ampd") == AmpdOrdering(window=3)


def test_parameters_may_come_from_a_mapping_and_as_text() -> None:
    given = {"alpha": 0.5}
    assert registry.create("routing", "ampd", **given) == AmpdRouting(alpha=0.5)
    assert registry.create("ordering", "ampd", window="32") == AmpdOrdering(window=32)


@pytest.mark.parametrize(
    ("kind", "name", "parameters", "words"),
    [
        ("routing", "nope", {}, ["routing", "'nope'", "always-local, always-remote, ampd"]),
        ("colour", "ampd", {}, ["'colour'", "binding, routing, ordering"]),
        ("routing", "ampd", {"gamma": 1}, ["routing policy ampd", "'gamma'", "alpha, beta"]),
        ("ordering", "fcfs", {"window": 3}, ["ordering policy fcfs", "'window'", "no parameters"]),
        ("routing", "ampd", {"alpha": -1}, ["routing policy ampd", "alpha", "greater than 0", "-1"]),
        ("routing", "ampd", {"alpha": float("nan")}, ["alpha"]),
        ("ordering", "ampd", {"window": "many"}, ["window", "'many'"]),
    ],
)
def test_a_wrong_choice_is_one_line_that_helps(
    kind: str, name: str, parameters: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        registry.create(kind, name, **parameters)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_name_cannot_be_taken_twice() -> None:
    registry.ROUTING.names()

    class Other(registry.Policy):
        """Another one."""

    with pytest.raises(ValueError, match="registered twice"):
        registry.register("routing", "ampd")(Other)
    assert isinstance(registry.create("routing", "ampd"), AmpdRouting)


_OWN = """
from ampd.policies.registry import register
from ampd.policies.routing.always_local import AlwaysLocal

@register("routing", "own")
class Own(AlwaysLocal):
    pass
"""


AskRegistry = Callable[[str], str]


@pytest.fixture
def ask_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AskRegistry]:
    """What a registry that has imported nothing yet says of the routing policy `own`; modules lie in `tmp_path`."""
    monkeypatch.syspath_prepend(tmp_path)
    registry.ROUTING.names()
    known, modules = dict(registry.ROUTING._policies), set(sys.modules)

    def forget() -> None:
        registry._import_policies.cache_clear()
        registry.ROUTING._policies.clear()
        registry.ROUTING._policies.update(known)
        for name in set(sys.modules) - modules:
            del sys.modules[name]

    def ask(names: str) -> str:
        forget()
        monkeypatch.setenv(registry.MODULES_VARIABLE, names)
        try:
            return type(registry.create("routing", "own")).__name__
        except UserError as error:
            return str(error)

    yield ask
    forget()


def test_modules_that_the_environment_names_bring_policies_of_their_own(
    tmp_path: Path, ask_registry: AskRegistry
) -> None:
    (tmp_path / "my_policies.py").write_text(_OWN)
    assert ask_registry(" my_policies ,") == "Own"
    assert ask_registry("").startswith("unknown routing policy 'own'")
    missing = ask_registry("nowhere.at_all")
    assert missing.splitlines() == ["AMPD_POLICY_MODULES: cannot import 'nowhere.at_all': No module named 'nowhere'"]


@pytest.mark.parametrize(
    ("module", "source", "line"),
    [
        ("broken", "def (", "SyntaxError: "),
        ("taken", _OWN.replace('"own"', '"ampd"'), "ValueError: routing policy 'ampd' is registered twice"),
        ("careless", "raise RuntimeError('first\\nsecond')", "RuntimeError: first"),
        (".relative", "", "TypeError: "),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_in_one_line(
    tmp_path: Path, ask_registry: AskRegistry, module: str, source: str, line: str
) -> None:
    (tmp_path / f"{module}.py").write_text(source)
    told = ask_registry(module).splitlines()
    assert len(told) == 1
    assert told[0].startswith(f"AMPD_POLICY_MODULES: cannot import {module!r}: {line}")


@pytest.mark.parametrize("kind", registry.KINDS)
def test_every_policy_is_documented_where_it_lives(kind: str) -> None:
    for name in registry.of_kind(kind).names():
        policy = registry.of_kind(kind).policy(name)
        for part in ("Reads:", "Limits:", f"Example: `--{kind} {name}`"):
            assert part in (policy.__doc__ or ""), f"{kind} {name} lacks {part}"
        assert all(field.description for field in policy.model_fields.values())


def test_the_reference_is_up_to_date() -> None:
    root = Path(__file__).parents[3]
    assert (root / "docs/policies.md").read_text() == policies.render(), "run: make docs"
    assert (root / "benchmarks/rivals/README.md").read_text() == rivals.render(), "run: make docs"


def test_a_parameter_that_is_nested_too_deeply_is_one_line() -> None:
    with pytest.raises(UserError) as caught:
        registry.create_named("routing", f"ampd(alpha={'[' * 20_000})")
    assert "\n" not in str(caught.value)
