"""The import from AIConfigurator: against its own numbers, and refusals in one line."""

import sys

import pytest

from ampd.errors import UserError
from ampd.perf.aiconfigurator import aiconfigurator_model
from ampd.perf.presets import MODELS, analytic_model
from ampd.types import Parallelism

aiconfigurator = pytest.importorskip("aiconfigurator_core")
TP4 = Parallelism(4)


def test_the_curves_are_those_of_the_package() -> None:
    from aiconfigurator_core.sdk.engine import EngineHandle

    theirs = EngineHandle.compile("meta-llama/Meta-Llama-3.1-8B", "h100_sxm", "sglang", tp_size=4)
    ours = aiconfigurator_model("llama-3.1-8b", "h100", degrees=(4,))
    for hist, incr in ((0, 700), (0, 3000), (2000, 300), (8000, 1500)):
        expected_s = theirs.predict_prefill_latency(1, hist + incr, hist) / 1e3
        assert ours.prefill_s(hist, incr, TP4) == pytest.approx(expected_s, rel=0.15)
    for batch, context in ((1, 2000), (24, 700), (100, 3000)):
        expected_s = theirs.predict_decode_latency(batch, context) / 1e3
        assert ours.decode_step_s(batch, batch * context, TP4) == pytest.approx(expected_s, rel=0.15)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_roofline_is_not_far_from_it(name: str) -> None:
    """Both describe the same hardware: a factor of two between them would be a mistake in one."""
    theirs = aiconfigurator_model(name, "h200", degrees=(4,))
    ours = analytic_model(name, "h200", degrees=(4,))
    for incr in (512, 4096):
        assert 0.5 < ours.prefill_s(0, incr, TP4) / theirs.prefill_s(0, incr, TP4) < 2
    for batch in (1, 16, 64):
        ratio = ours.decode_step_s(batch, 1000 * batch, TP4) / theirs.decode_step_s(batch, 1000 * batch, TP4)
        assert 0.5 < ratio < 2
    assert ours.kv_capacity_tokens(TP4) == theirs.kv_capacity_tokens(TP4)


def test_a_gpu_without_data_is_refused() -> None:
    with pytest.raises(UserError, match="no data for NVIDIA H20; it has a100, b200, h100, h200, l40s"):
        aiconfigurator_model("qwen3-32b", "h20")


def test_without_the_package_the_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", None)
    with pytest.raises(UserError, match=r"pip install 'ampd\[aiconfigurator\]'"):
        aiconfigurator_model("qwen3-32b", "h100")
