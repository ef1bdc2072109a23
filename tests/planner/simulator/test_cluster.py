"""Clusters: their texts, and the co-located form."""

import pytest

from ampd.errors import UserError
from ampd.types import Parallelism
from planner.simulator.options import Cluster, ReplicaGroup, parse_groups

from .lab import SLO


@pytest.mark.parametrize("text", ["2xTP4", "2x4", " 2xtp4 "])
def test_groups_are_read(text: str) -> None:
    assert parse_groups(text, "--prefill") == ((2, Parallelism(4)),)


@pytest.mark.parametrize("text", ["2xTP4,1xTP8", "2xTP4+1xTP8", "2x4 + 1x8"])
def test_groups_are_separated_as_users_and_plans_write_them(text: str) -> None:
    assert parse_groups(text, "--prefill") == ((2, Parallelism(4)), (1, Parallelism(8)))


@pytest.mark.parametrize(
    "text", ["TP4", "2xTP4+", "2xTP", "0xTP4", "2xTP0", "2xTP4;1xTP8", "-1xTP4", "1xTP" + "9" * 400, "9" * 5000 + "x1"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--prefill: give replicas"):
        parse_groups(text, "--prefill")


def test_a_colocated_cluster_keeps_all_gpus() -> None:
    cluster = Cluster(
        decode=(ReplicaGroup(1, Parallelism(8), 10),),
        prefill=(ReplicaGroup(2, Parallelism(4), 10), ReplicaGroup(1, Parallelism(8), 10)),
    )
    together = cluster.colocated()
    assert together.gpus == cluster.gpus == 24
    assert together.is_colocated
    assert str(together) == "co-located 2xTP4+2xTP8"
    assert SLO.ttft_s > 0


def test_mixed_replicas_are_named_after_the_others_and_count() -> None:
    tp4 = (ReplicaGroup(1, Parallelism(4), 10),)
    cluster = Cluster(decode=tp4, prefill=tp4, mixed=(ReplicaGroup(2, Parallelism(2)), ReplicaGroup(1, Parallelism(8))))
    assert (cluster.gpus, str(cluster)) == (20, "prefill 1xTP4, decode 1xTP4, mixed 2xTP2+1xTP8")
    alone = Cluster(decode=(), mixed=tp4)
    assert (str(alone), alone.is_colocated) == ("mixed 1xTP4", False)
    together = cluster.colocated()
    assert (str(together), together.gpus) == ("co-located 2xTP2+2xTP4+1xTP8", 20)
