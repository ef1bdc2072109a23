"""The default binding in a simulation: co-located workers get sessions by their queues, not only by their memory."""

from dataclasses import replace

from ampd.perf.presets import analytic_model
from ampd.policies import defaults
from ampd.policies.registry import create
from ampd.types import Parallelism, Slo
from planner.simulator.options import Cluster, Policies, ReplicaGroup
from planner.simulator.simulate import simulate
from workloads.trace import load_trace, retime

MODEL = analytic_model("llama-3.1-8b", "h100")
SLO = Slo(0.3, 0.02)


def test_workers_that_prefill_for_themselves_are_bound_by_their_time() -> None:
    """With memory alone, sessions that arrive together are prefilled one after the other on the emptiest worker."""
    tp = Parallelism(1)
    cluster = Cluster(decode=(ReplicaGroup(4, tp, MODEL.kv_capacity_tokens(tp) or 0),), prefill=())
    sessions = retime(load_trace("tau-bench-airline"), 42.0, 1, 300)
    policies = Policies(
        create("binding", defaults.BINDING),
        create("routing", defaults.ROUTING),
        create("ordering", defaults.ORDERING),
        create("slicing", defaults.SLICING),
    )
    by_default = simulate(sessions, cluster, MODEL, policies, SLO).attainment(SLO)
    by_memory = simulate(sessions, cluster, MODEL, replace(policies, binding=create("binding", "least-kv")), SLO)
    assert by_default.sessions > by_memory.attainment(SLO).sessions + 0.1
    assert by_default.sessions > 0.95
