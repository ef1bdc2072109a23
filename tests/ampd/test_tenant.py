"""Which tenant a request belongs to."""

from __future__ import annotations

import pytest

from ampd.keys import MAX_TENANT_CHARS, tenant_of


@pytest.mark.parametrize("routing", [None, {}, {"cache_salt": None}, {"cache_salt": ""}, {"priority": 3}])
def test_a_request_without_a_salt_belongs_to_the_common_tenant(routing: dict[str, object] | None) -> None:
    assert tenant_of({"routing": routing}) == tenant_of({}) == ""


def test_the_salt_names_the_tenant() -> None:
    assert tenant_of({"routing": {"cache_salt": "acme"}}) == "acme"


@pytest.mark.parametrize("salt", [7, ["acme"], "a" * (MAX_TENANT_CHARS + 1)])
def test_what_names_no_tenant_is_refused(salt: object) -> None:
    with pytest.raises(ValueError, match="x-tenant-id"):
        tenant_of({"routing": {"cache_salt": salt}})
