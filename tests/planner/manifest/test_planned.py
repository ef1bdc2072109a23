"""`ampd plan --output-manifest`: real plans written in both forms, what is said about them, and refusals."""

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from ampd_rivals.ppd.table_file import DEFAULT_TABLE

from ampd.cli.main import main as ampd
from ampd.cli.serve import settings as checks
from ampd.cli.serve.settings import read_settings
from ampd.errors import UserError
from ampd.perf.presets import DEGREES, MODELS, analytic_model, load_performance_model
from ampd.perf.profile import write_profile
from ampd.types import Role, Slo
from planner import plan_command
from planner.layout.layout import Layout, layout_label
from planner.manifest.files import base_objects
from planner.manifest.planned import _PARSERS, SECRETS, Deployment, _rehearsal
from workers.engines.sglang_settings import check_degree

from .lab import built, by_identity, components, graph_of, main, needs_kubectl

pytestmark = pytest.mark.usefixtures("short_trials")
TAU = ["plan", "tau-bench-airline", "--gpus", "6", "--rate", "12", "--ttft", "0.2", "--itl", "0.02"]
TAU += ["--degrees", "1,2", "--force"]
MUCH = ["--budget-s", "1000000"]
FIRST = ["--budget-s", "0"]
"""The programme's layout, simulated once: enough for a manifest."""
LLAMA = [*TAU, "--model", "llama-3.1-8b", "--gpu", "h100"]


def planned(capsys: pytest.CaptureFixture[str], argv: list[str]) -> tuple[dict[str, Any], str]:
    assert ampd([*argv, "--json"]) == 0
    out, err = capsys.readouterr()
    result: dict[str, Any] = json.loads(out)
    return result, err


@pytest.mark.long
@needs_kubectl
def test_a_plan_is_written_in_both_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "plan.yaml", tmp_path / "plan"
    argv = [*LLAMA, *FIRST, "--degrees", "2,4", "--rate", "60"]
    result, err = planned(capsys, [*argv, "--output-manifest", str(file)])
    assert result["manifest"] == str(file)
    again, _ = planned(capsys, [*argv, "--output-manifest", str(folder)])
    assert again["manifest"] == str(folder)
    objects = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    assert by_identity(built(folder)) == by_identity(objects)

    best = result["layouts"][0]
    graph = components(objects)
    for role in ("prefill", "decode"):
        for group in best[role]:
            assert graph[f"{role}-tp{group['tp']}"]["replicas"] == group["replicas"]
    workers = [each for each in graph.values() if each["type"] in ("prefill", "decode")]
    gpus = sum(worker["replicas"] * int(main(worker)["resources"]["limits"]["nvidia.com/gpu"]) for worker in workers)
    assert gpus == best["gpus"]
    arguments = main(graph["coordinator"])["args"]
    assert "--model=/models/llama-3.1-8b" in arguments
    assert f"--routing={result['routing']}" in arguments
    assert "--dyn-tool-call-parser=llama3_json" in arguments
    assert not [argument for argument in arguments if "reasoning" in argument]

    profile = tmp_path / "model.json"
    profile.write_text(by_identity(objects)["ConfigMap", "ampd-performance-model"]["data"]["model.json"])
    assert load_performance_model(profile).profile == analytic_model("llama-3.1-8b", "h100").profile

    has_groups = any(group["tp"] > 1 for role in ("prefill", "decode") for group in best[role])
    assert has_groups
    assert "refuse these degrees" not in err


@pytest.mark.long
def test_the_annotations_are_what_the_plan_expects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.yaml"
    result, _ = planned(capsys, [*LLAMA, *MUCH, "--output-manifest", str(file)])
    objects = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    annotations = graph_of(objects)["metadata"]["annotations"]
    ours = {key.removeprefix("ampd.dev/"): value for key, value in annotations.items() if "ampd.dev/" in key}
    assert ours.pop("warnings", "").splitlines() == result["manifest_warnings"]
    layout = result["layouts"][0]
    assert ours.pop("meets-targets") == json.dumps(layout["meets_slo"])
    seen = layout["simulated"]
    figures = {
        "expected-attainment-rounds": seen["attainment"]["rounds"],
        "expected-attainment-sessions": seen["attainment"]["sessions"],
        "expected-ttft-p95-seconds": seen["ttft_s"]["p95"],
        "expected-itl-p95-seconds": seen["mean_itl_s"]["p95"],
        "expected-local-rounds": seen["routes"]["local"] / sum(seen["routes"].values()),
        "rate-sessions-per-second": 12,
        "gpus": layout["gpus"],
        "objective": layout["objective"],
        "headroom": layout["headroom"],
        "ttft-target-seconds": 0.2,
        "itl-target-seconds": 0.02,
        "seed": 0,
    }
    for name, value in figures.items():
        assert float(ours.pop(name)) == pytest.approx(value, rel=1e-5), name
    assert ours == {
        "version": version("ampd"),
        "model": "llama-3.1-8b",
        "gpu": "h100",
        "performance-model": "analytic",
        "trace": "tau-bench-airline",
        "layout": layout_label(layout),
    }
    assert all(isinstance(value, str) for value in annotations.values())
    names = [name for name in components(objects) if "-tp" in name]
    assert names == [f"{role}-tp{each['tp']}" for role in Role for each in layout.get(role, [])]


@pytest.mark.slow
def test_a_profile_and_the_users_own_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rounds = [{"incr_tokens": 40, "output_tokens": 1}]
    trace.write_text("\n".join(json.dumps({"session_id": f"s{n}", "arrival_s": n, "rounds": rounds}) for n in range(9)))
    file = tmp_path / "plan.yaml"
    argv = ["plan", str(trace), "--perf", "tiny-cpu", "--gpus", "2", "--ttft", "0.25", "--itl", "0.03", "--seed", "3"]
    argv += ["--ordering", "fcfs", "--slicing", "whole", "--kv-capacity-tokens", "9000", "--limit", "8"]
    argv += ["--output-manifest", str(file), "--manifest-model-path", "/models/mine/My-Model/"]
    argv += ["--degrees", "1"]
    result, err = planned(capsys, argv)
    objects = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    graph = components(objects)
    coordinator, worker = main(graph["coordinator"]), main(graph["decode-tp1"])
    assert "--model=/models/mine/My-Model" in coordinator["args"]
    assert "--model-name=My-Model" in coordinator["args"]
    for flag in ("--model=/models/mine/My-Model", "--ordering=fcfs", "--slicing=whole", "--max-total-tokens=9000"):
        assert flag in worker["args"]
    annotations = graph_of(objects)["metadata"]["annotations"]
    assert annotations["ampd.dev/trace"] == "trace.jsonl"  # not where it lies on this machine
    assert annotations["ampd.dev/model"] == result["performance_model"]["model"]
    assert annotations["ampd.dev/gpu"] == result["performance_model"]["gpu"]
    assert annotations["ampd.dev/seed"] == "3"
    assert result["layouts"][0]["simulated"]["mean_itl_s"]["p95"] is None
    assert "ampd.dev/expected-itl-p95-seconds" not in annotations
    assert str(tmp_path) not in file.read_text(encoding="utf-8")
    assert "no tool-call parser is known for My-Model" in err
    environment = {each["name"]: each.get("value") for each in graph_of(objects)["spec"]["env"]}
    assert (environment["AMPD_TTFT"], environment["AMPD_ITL"]) == ("0.25", "0.03")


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "is_met", "words"),
    [
        (["--degrees", "1"], True, []),
        (["--degrees", "2"], True, []),
        (["--degrees", "1", "--itl", "0.008"], False, ["does not meet the targets: it attains"]),
        (["--degrees", "1", "--gpus", "1", "--rate", "90"], False, ["does not meet the targets: it attains"]),
    ],
)
def test_what_speaks_against_a_manifest_is_in_the_manifest(
    flags: list[str], is_met: bool, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "plan.yaml", tmp_path / "plan"
    argv = [*LLAMA, *FIRST, "--limit", "60", *flags]
    for path, head in ((file, file), (folder, folder / "kustomization.yaml")):
        result, err = planned(capsys, [*argv, "--output-manifest", str(path)])
        warnings = result["manifest_warnings"]
        assert len(warnings) == len(words)
        assert all(word in warning for word, warning in zip(words, warnings, strict=True))
        comments = [line for line in head.read_text(encoding="utf-8").splitlines() if line.startswith("# WARNING: ")]
        assert comments == [f"# WARNING: {warning}" for warning in warnings]
        texts = [path] if path is file else sorted(path.glob("*.yaml"))
        objects = [each for text in texts for each in yaml.safe_load_all(text.read_text(encoding="utf-8"))]
        annotations = graph_of(objects)["metadata"]["annotations"]
        assert annotations["ampd.dev/meets-targets"] == ("true" if is_met else "false")
        assert annotations.get("ampd.dev/warnings") == ("\n".join(warnings) or None)
        assert all(f"ampd plan: {warning}" in err.splitlines() for warning in warnings)
    assert planned(capsys, argv)[0]["manifest_warnings"] == []


@pytest.mark.long
def test_a_policys_own_file_is_warned_of_and_a_profile_of_a_known_model_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, perf, file = tmp_path / "mine.json", tmp_path / "perf.json", tmp_path / "plan.yaml"
    table.write_bytes(DEFAULT_TABLE.read_bytes())
    profile = analytic_model("llama-3.1-8b", "h100").profile
    named = profile.provenance.model_copy(update={"model": "meta-llama/Llama-3.1-8B, 16-bit"})
    write_profile(profile.model_copy(update={"provenance": named}), perf)
    argv = [*TAU, *FIRST, "--perf", str(perf), "--routing", f"table(table={table})"]
    result = planned(capsys, [*argv, "--output-manifest", str(file)])[0]
    assert f"the image must hold {table}, which the policy table reads" in result["manifest_warnings"]
    objects = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    arguments = main(components(objects)["coordinator"])["args"]
    assert f"--routing=table(table={table})" in arguments
    assert "--model=/models/llama-3.1-8b" in arguments
    assert "--dyn-tool-call-parser=llama3_json" in arguments


@pytest.mark.long
def test_the_table_names_the_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.yaml"
    assert ampd([*LLAMA, *FIRST, "--output-manifest", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"Manifest: {file}" in lines
    *secrets, volume, apply = lines[-4:]
    assert (secrets, apply) == ([*SECRETS], f"kubectl apply -f {file}")
    assert volume.startswith("kubectl apply -f k8s/models/volume.yaml  # ")
    head = [line.removeprefix("# ") for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    commands = [line.partition(" # ")[0] for line in head if line.startswith("kubectl")]
    assert commands == [*SECRETS, "kubectl apply -f k8s/models/volume.yaml", f"kubectl apply -f {file.name}"]
    assert ampd([*LLAMA, *FIRST]) == 0
    assert "Manifest" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--output-manifest", "{}/missing/plan.yaml"],
            r"cannot be written: .*No such file.*; name a folder that you may write to",
        ),
        (["--output-manifest", "{}/foreign"], r"--output-manifest: .* holds notes\.txt"),
        *(
            (
                ["--output-manifest", "{}/plan.yaml", "--manifest-model-path", path],
                r"--manifest-model-path: .* below /models",
            )
            for path in ("qwen", "/models", "/weights/qwen", "/models/../etc", "/modelsqwen")
        ),
        (["--output-manifest", "{}/plan.yaml", "--report", "{}/missing/x.html"], r"x\.html: cannot be written"),
    ],
)
def test_wrong_calls_are_refused_before_anything_is_planned(
    flags: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_plan(*_: object) -> None:
        raise AssertionError("it planned")

    monkeypatch.setattr(plan_command, "planned", no_plan)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    assert ampd([*LLAMA, *(flag.format(tmp_path) for flag in flags)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert re.search(words, err), err
    assert not (tmp_path / "plan.yaml").exists()


@pytest.mark.slow
def test_a_folder_can_be_rehearsed_and_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "planned"
    for _ in range(2):
        result, _ = planned(capsys, [*LLAMA, *FIRST, "--degrees", "2", "--output-manifest", str(folder)])
    layout = result["layouts"][0]
    settings = read_settings(["--plan", str(folder), "--coordinators", "1"])
    counts = {role: group[0]["replicas"] for role in Role if (group := layout.get(role))}
    assert settings.start() == counts
    assert {settings.degree(role) for role in counts} == {2}
    assert (settings.engine, settings.model_name, settings.coordinators) == ("modelled", ["llama-3.1-8b"], 1)
    assert (settings.ttft, settings.itl, settings.routing) == (0.2, 0.02, "predictive")
    assert settings.perf == str(folder / "model.json")
    checks.check_perf(settings)
    with pytest.raises(UserError, match="--plan: has the settings of a --config"):
        read_settings(["--plan", str(folder), f"--config={folder / 'serve.toml'}"])
    assert json.loads((folder / "plan.json").read_text())["layouts"] == result["layouts"]
    (folder / "serve.toml").unlink()
    with pytest.raises(UserError, match=r"planned has no serve\.toml"):
        read_settings(["--plan", str(folder)])


def test_replicas_of_several_degrees_in_a_role_are_not_rehearsed() -> None:
    model = load_performance_model("qwen3-32b-h20")
    layout = Layout(((1, 2),), ((1, 1), (2, 1)))
    deployment = Deployment(layout, "/models/x", "x", model.profile, Slo(1, 1), {})
    assert _rehearsal(deployment, base_objects()) == {}


def test_parsers_are_dynamos_and_models_are_presets() -> None:
    from dynamo._core import get_reasoning_parser_names, get_tool_parser_names

    assert _PARSERS.keys() <= MODELS.keys()
    for tool_calls, reasoning in _PARSERS.values():
        assert tool_calls in get_tool_parser_names()
        assert reasoning is None or reasoning in get_reasoning_parser_names()


@pytest.mark.parametrize("tp", DEGREES)
def test_the_degrees_without_a_warning_are_those_that_workers_take(tp: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 64, "num_key_value_heads": 8}))
    check_degree(tmp_path, tp, "worker")
