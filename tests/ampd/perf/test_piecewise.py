import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.errors import UserError
from ampd.perf.model import PerformanceModel, scaled
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import load_performance_model, profile_names
from ampd.perf.profile import PerformanceProfile, write_profile
from ampd.types import Factors, Parallelism

TP1 = Parallelism(1)
DOCUMENT: dict[str, Any] = {
    "format": "ampd-performance-model/1",
    "provenance": {
        "kind": "rough",
        "source": "test",
        "model": "m",
        "gpu": "g",
        "date": "2026-01-02",
        "method": "by hand",
        "fit_error": {"prefill": 0.03},
    },
    "workers": [
        {
            "tp": 1,
            "prefill": {
                "history_s_per_token": 1e-6,
                "segments": [
                    {"from_incr_tokens": 0, "alpha_s": 0.01, "beta_s_per_token": 1e-4, "gamma_s_per_token2": 2e-8},
                    {"from_incr_tokens": 100, "alpha_s": 0.002, "beta_s_per_token": 3e-4, "gamma_s_per_token2": 1e-8},
                ],
            },
            "decode": {
                "context_s_per_token": 1e-6,
                "segments": [
                    {"from_batch": 0, "alpha_s": 0.005, "beta_s_per_sequence": 1e-4},
                    {"from_batch": 8, "alpha_s": 0.001, "beta_s_per_sequence": 5e-4},
                ],
            },
        }
    ],
    "kv_transfers": [
        {
            "tp_source": 1,
            "tp_target": 1,
            "segments": [
                {"from_tokens": 0, "alpha_s": 0.001, "beta_s_per_token": 1e-6},
                {"from_tokens": 1000, "alpha_s": 0, "beta_s_per_token": 5e-7},
            ],
        }
    ],
}
HAND = PiecewiseModel(PerformanceProfile.model_validate_json(json.dumps(DOCUMENT)))


def test_prefill_is_the_sum_of_its_segments() -> None:
    assert HAND.prefill_s(0, 50, TP1) == pytest.approx(0.01 + 50 * 1e-4 + 2e-8 * 50 * 25)
    # 100 tokens in the first segment, 60 in the second, each looking at the history and at all before it.
    first = 0.01 + 100 * 1e-4 + 2e-8 * 100 * (5000 + 50)
    second = 0.002 + 60 * 3e-4 + 1e-8 * 60 * (5000 + 100 + 30)
    assert HAND.prefill_s(5000, 160, TP1) == pytest.approx(5000 * 1e-6 + first + second)


def test_decode_and_transfer_are_the_sums_of_theirs() -> None:
    assert HAND.decode_step_s(3, 900, TP1) == pytest.approx(0.005 + 3e-4 + 9e-4)
    assert HAND.decode_step_s(10, 0, TP1) == pytest.approx(0.005 + 8e-4 + 0.001 + 2 * 5e-4)
    assert HAND.kv_transfer_s(400, TP1, TP1) == pytest.approx(0.001 + 4e-4)
    assert HAND.kv_transfer_s(3000, TP1, TP1) == pytest.approx(0.001 + 1e-3 + 2000 * 5e-7)


def test_kv_of_the_same_host_is_not_moved() -> None:
    document = json.dumps(DOCUMENT | {"kv_bytes_per_token": 1_000_000})
    sized = PiecewiseModel(PerformanceProfile.model_validate_json(document))
    for model, verify_s in ((HAND, 0.0), (sized, 0.06)):
        here, there = Parallelism(1, host="a"), Parallelism(1, Factors(read=3.0), "a")
        assert model.kv_transfer_s(3000, here, there) == pytest.approx(0.001 + verify_s)
        assert model.kv_transfer_s(0, here, there) == 0.0
        for other in (TP1, Parallelism(1, host="b")):
            assert model.kv_transfer_s(3000, other, here) == HAND.kv_transfer_s(3000, TP1, TP1)
            assert model.kv_transfer_s(3000, here, other) == HAND.kv_transfer_s(3000, TP1, TP1)
    assert Parallelism(2, host="a") == Parallelism(2)


def test_history_counts() -> None:
    for name in profile_names():
        model = load_performance_model(name)
        for parallelism in model.parallelisms:
            assert model.prefill_s(50_000, 500, parallelism) > 1.05 * model.prefill_s(0, 500, parallelism)


cost = st.floats(0, 10, allow_nan=False)


@st.composite
def starts(draw: st.DrawFn) -> list[int]:
    return [0, *sorted(draw(st.sets(st.integers(1, 5000), max_size=4)))]


@st.composite
def models(draw: st.DrawFn) -> PiecewiseModel:
    document = json.loads(json.dumps(DOCUMENT))
    worker = document["workers"][0]
    worker["prefill"] = {
        "history_s_per_token": draw(cost),
        "segments": [
            {
                "from_incr_tokens": at,
                "alpha_s": draw(cost),
                "beta_s_per_token": draw(cost),
                "gamma_s_per_token2": draw(cost),
            }
            for at in draw(starts())
        ],
    }
    worker["decode"] = {
        "context_s_per_token": draw(cost),
        "segments": [
            {"from_batch": at, "alpha_s": draw(cost), "beta_s_per_sequence": draw(cost)} for at in draw(starts())
        ],
    }
    document["kv_transfers"][0]["segments"] = [
        {"from_tokens": at, "alpha_s": draw(cost), "beta_s_per_token": draw(cost)} for at in draw(starts())
    ]
    return PiecewiseModel(PerformanceProfile.model_validate_json(json.dumps(document)))


tokens = st.integers(0, 20_000)
more = st.integers(0, 6000)


def not_less(larger: float, smaller: float) -> bool:
    return larger >= smaller * (1 - 1e-12)


@given(models(), tokens, tokens, more, more)
def test_prefill_never_falls_with_history_or_increment(
    model: PiecewiseModel, hist: int, incr: int, more_hist: int, more_incr: int
) -> None:
    base = model.prefill_s(hist, incr, TP1)
    assert base >= 0
    assert not_less(model.prefill_s(hist + more_hist, incr, TP1), base)
    assert not_less(model.prefill_s(hist, incr + more_incr, TP1), base)


@given(models(), tokens, tokens, more, more)
def test_decode_never_falls_with_batch_or_context(
    model: PiecewiseModel, batch: int, context: int, more_batch: int, more_context: int
) -> None:
    base = model.decode_step_s(batch, context, TP1)
    assert base >= 0
    assert not_less(model.decode_step_s(batch + more_batch, context, TP1), base)
    assert not_less(model.decode_step_s(batch, context + more_context, TP1), base)


@given(models(), tokens, more)
def test_transfer_never_falls_with_tokens(model: PiecewiseModel, moved: int, more_moved: int) -> None:
    assert not_less(model.kv_transfer_s(moved + more_moved, TP1, TP1), model.kv_transfer_s(moved, TP1, TP1))


@given(models(), tokens)
def test_nothing_to_do_takes_no_time(model: PiecewiseModel, hist: int) -> None:
    assert model.prefill_s(hist, 0, TP1) == 0
    assert model.decode_step_s(0, 0, TP1) == 0
    assert model.kv_transfer_s(0, TP1, TP1) == 0


def test_saved_and_loaded_models_are_equal(tmp_path: Path) -> None:
    for name in profile_names():
        model = load_performance_model(name)
        write_profile(model.profile, tmp_path / "saved.json")
        again = load_performance_model(tmp_path / "saved.json")
        assert again.profile == model.profile
        tp = model.parallelisms[-1]
        assert again.prefill_s(4000, 700, tp) == model.prefill_s(4000, 700, tp)
    assert [path.name for path in tmp_path.iterdir()] == ["saved.json"]


@given(models())
def test_any_profile_survives_its_file(model: PiecewiseModel) -> None:
    assert PerformanceProfile.model_validate_json(model.profile.model_dump_json(indent=2)) == model.profile


def test_the_shipped_profiles_say_where_they_come_from() -> None:
    assert set(profile_names()) == {"qwen3-32b-h20", "tiny-cpu"}
    tiny = load_performance_model("tiny-cpu")
    degrees = [Parallelism(1), Parallelism(2), Parallelism(4)]
    tiny.require(degrees, degrees)
    measured = tiny.provenance
    assert measured.kind == "measured"
    assert {"prefill_mean", "prefill_max", "decode_mean", "kv_transfer_mean"} <= measured.fit_error.keys()
    analytic = load_performance_model("qwen3-32b-h20").provenance
    assert analytic.kind == "analytic"
    assert {"matmul_flops_share", "memory_share", "flops_per_s"} <= analytic.assumptions.keys()


def one_line(caught: pytest.ExceptionInfo[UserError]) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError) as caught:
        load_performance_model("no-such-profile")
    message = one_line(caught)
    assert "no-such-profile" in message
    assert all(name in message for name in profile_names())


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("workers", 0, "prefill", "segments", 1, "beta_s_per_token"), -1, ["workers.0.prefill.segments.1.beta_s_per"]),
        (("workers", 0, "prefill", "segments", 0, "from_incr_tokens"), 5, ["workers.0.prefill.segments", "must have"]),
        (("workers", 0, "decode", "segments", 1, "from_batch"), 0, ["workers.0.decode.segments", "must grow"]),
        (("workers", 0, "decode", "context_ms_per_token"), 1, ["decode.context_ms_per_token", "unknown field"]),
        (("workers",), [], ["workers", "at least 1"]),
        (("workers", 0, "tp"), 0, ["workers.0.tp"]),
        (("workers",), [DOCUMENT["workers"][0]] * 2, ["tp occurs twice"]),
        (("kv_transfers",), [DOCUMENT["kv_transfers"][0]] * 2, ["pair", "occurs twice"]),
        (("provenance", "source"), "", ["provenance.source"]),
        (("format",), "ampd-performance-model/9", ["format", "ampd-performance-model/1"]),
    ],
)
def test_a_wrong_field_is_named_with_its_file(
    tmp_path: Path, path: tuple[str | int, ...], value: object, words: list[str]
) -> None:
    document = json.loads(json.dumps(DOCUMENT))
    target = document
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(document))
    with pytest.raises(UserError) as caught:
        load_performance_model(file)
    message = one_line(caught)
    for word in [str(file), *words]:
        assert word in message


@pytest.mark.parametrize("text", ["", "not json", "[]", '{"format": "ampd-performance-model/1"}', "\xff\xfe"])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "wrong.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError) as caught:
        load_performance_model(file)
    assert str(file) in one_line(caught)


def test_a_parallelism_that_is_missing_names_those_that_are_there() -> None:
    model = load_performance_model("qwen3-32b-h20")
    tp3, tp4 = Parallelism(3), Parallelism(4)
    for ask in (
        lambda: model.prefill_s(0, 1, tp3),
        lambda: model.decode_step_s(1, 1, tp3),
        lambda: model.require([tp4], [tp3]),
    ):
        with pytest.raises(UserError, match=r"qwen3-32b-h20: no times for tp 3; it has tp 1, 2, 4, 8"):
            ask()
    with pytest.raises(UserError, match=r"tp 4 -> 3; it has 1 -> 1, 1 -> 2"):
        model.kv_transfer_s(1, tp4, tp3)
    model.require([tp4], [tp4, Parallelism(1)])


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        write_profile(HAND.profile, tmp_path / "no-folder" / "saved.json")
    assert "no-folder" in one_line(caught)


def test_a_scaled_model_runs_on_another_clock() -> None:
    slow: PerformanceModel = HAND
    fast = scaled(slow, 0.1)
    assert fast.prefill_s(100, 50, TP1) == pytest.approx(0.1 * slow.prefill_s(100, 50, TP1))
    assert fast.decode_step_s(4, 50, TP1) == pytest.approx(0.1 * slow.decode_step_s(4, 50, TP1))
    assert fast.kv_transfer_s(50, TP1, TP1) == pytest.approx(0.1 * slow.kv_transfer_s(50, TP1, TP1))
    with_bytes = PiecewiseModel(HAND.profile.model_copy(update={"kv_bytes_per_token": 1000}))
    assert scaled(with_bytes, 0.1).reload_s(50, TP1) == pytest.approx(0.1 * with_bytes.reload_s(50, TP1))
    assert scaled(slow, 1) is slow
    with pytest.raises(ValueError, match="time_scale"):
        scaled(slow, 0)


@pytest.mark.parametrize(
    ("gpu", "bytes_per_s"),
    [("NVIDIA H200", 0.8 * 64e9), ("NVIDIA A100-SXM4-80GB", 0.8 * 32e9), ("2 cores", 0.8 * 32e9)],
)
def test_a_reload_takes_the_bytes_of_a_gpu_over_its_link_to_the_host(gpu: str, bytes_per_s: float) -> None:
    provenance = HAND.profile.provenance.model_copy(update={"gpu": gpu})
    profile = HAND.profile.model_copy(update={"kv_bytes_per_token": 100_000, "provenance": provenance})
    assert PiecewiseModel(profile).reload_s(5000, TP1) == pytest.approx(5000 * 100_000 / bytes_per_s)
    faster = profile.model_copy(update={"host_link_bytes_per_s": 1e9})
    assert PiecewiseModel(faster).reload_s(5000, TP1) == pytest.approx(0.5)
    assert PiecewiseModel(faster).reload_s(0, TP1) == 0


def test_a_reload_of_unknown_size_or_parallelism_is_refused() -> None:
    with pytest.raises(UserError, match="kv_bytes_per_token"):
        HAND.reload_s(1, TP1)
    with pytest.raises(UserError, match="no times for tp 3"):
        HAND.reload_s(1, Parallelism(3))
