"""Names of sessions and tenants inside of a graph."""

from hypothesis import given
from hypothesis import strategies as st

from ampd.keys import is_session_key, session_key, tenant_key

TEXTS = st.text(st.characters(), max_size=8)


def test_the_name_of_a_session_never_changes() -> None:
    """It is stored in Redis, which outlives a rolling update."""
    assert session_key("alice", "agent-7") == "51e77cff8bfd59e1d0b09784391e3a9a"
    assert session_key("", "agent-7") == "33ca4534720d120115cac50f8023d6dc"


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_no_two_sessions_of_any_tenants_have_one_name(tenant: str, name: str, other: str, other_name: str) -> None:
    same = (tenant, name) == (other, other_name)
    assert (session_key(tenant, name) == session_key(other, other_name)) is same
    assert (tenant_key(tenant) == tenant_key(other)) is (tenant == other)


@given(TEXTS, TEXTS)
def test_the_border_between_tenant_and_id_counts(tenant: str, name: str) -> None:
    assert session_key(tenant + "a", name) != session_key(tenant, "a" + name)


def test_the_form_of_a_name_is_recognised() -> None:
    assert is_session_key(session_key("alice", "agent-7"))
    assert not any(map(is_session_key, ("agent-7", "0" * 31, "0" * 33, "G" * 32, "A" * 32)))
