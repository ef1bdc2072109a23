"""What dashboard and alerts take from Dynamo's frontend is really there."""

import signal

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.harness.graph import HELLO, Graph, chat, profile
from tests.k8s.promql_check import DYNAMO_METRICS
from tests.waiting import PATIENCE_S

CLIENTS_MISTAKES = {"validation", "not_found", "not_implemented", "cancelled"}
"""Kinds of errors that the alert on the frontends' errors leaves out."""

pytestmark = pytest.mark.slow


async def test_the_frontend_has_the_metrics_that_we_show(graph: Graph) -> None:
    perf = profile(graph.folder, prefill_s=0.001, long_prefill_s=0.001, step_s=0.001)
    worker = await graph.new_worker("decode", perf)
    coordinator = graph.start_coordinator("always-local")
    graph.start_frontend()
    await graph.until_answers([coordinator])
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        unknown = await client.post("/v1/chat/completions", json={**chat(HELLO), "model": "another"})
        # A message without a role: the client's mistake.
        invalid = await client.post("/v1/chat/completions", json=chat([{"content": "hello"}]))
        await graph.end(graph.processes[worker], signal.SIGKILL)
        failed = await client.post("/v1/chat/completions", json=chat(HELLO))
        text = (await client.get("/metrics")).text
    assert (unknown.status_code, invalid.status_code, failed.status_code) == (404, 400, 503)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, known in DYNAMO_METRICS.items():
        family = families[name.removesuffix("_total")]
        assert family.type == known.kind, name
        labels = {label for sample in family.samples for label in sample.labels}
        assert labels - {"le"} == known.labels, name
    requests = {
        (sample.labels["status"], sample.labels["error_type"])
        for sample in families["dynamo_frontend_requests"].samples
    }
    ours = {(status, kind) for status, kind in requests if status == "error" and kind not in CLIENTS_MISTAKES}
    assert requests - ours == {("success", ""), ("error", "not_found")}
    assert len(ours) == 1, "the request that no worker could serve"
