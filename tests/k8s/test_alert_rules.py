"""Every alert fires when it should and is silent when it should not: stories of 40 minutes, told to `promtool`.

It is Prometheus's own (Debian: `apt-get install prometheus`); where it is not installed, these are skipped.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (of Prometheus) is not installed"),
]

ALERTS = Path(__file__).parents[2] / "k8s" / "monitoring" / "alerts.yaml"
MINUTES = 40
"""How long a story goes on; it turns bad, if it does, at half of that."""

GRAPH = 'job="ampd",namespace="n",dynamo_namespace="g"'
FRONTEND = 'job="ampd",namespace="n",component="frontend"'
ROUNDS = "ampd_rounds_total{" + GRAPH + ',pod="c-0",outcome="%s"}'
ADMISSIONS = "ampd_admissions_total{" + GRAPH + ',pod="c-0",session="%s",decision="%s"}'
LIVE = "ampd_live_workers{" + GRAPH + ',pod="c-0",role="%s"}'
REQUESTS = "dynamo_frontend_requests_total{" + FRONTEND + ',status="%s",error_type="%s"}'
WAIT = "ampd_prefill_queue_predicted_wait_seconds{" + GRAPH + ',instance="%s"}'
ROLE = "ampd_worker_role{" + GRAPH + ',role="%s",instance="%s"}'
STATE = "ampd_state_available{" + GRAPH + ',pod="%s"}'
AGE = "ampd_state_view_age_seconds{" + GRAPH + ',pod="%s",instance="%s"}'
LOSSES = "ampd_state_losses_total{" + GRAPH + ',pod="c-0"}'
FAILED_READS = "ampd_kv_read_failures_total{" + GRAPH + ',direction="%s"}'
READS = "ampd_kv_read_seconds_count{" + GRAPH + ',direction="%s"}'
HITS = "ampd_kv_hit_tokens_total{" + GRAPH + ',tier="%s"}'
EVICTED = "ampd_kv_store_evicted_tokens_total{" + GRAPH + ',cause="%s"}'
LOST = "ampd_sessions_lost_total{" + GRAPH + ',reason="%s"}'
BOUND = "ampd_sessions_bound_total{" + GRAPH + "}"
INFO = "ampd_coordinator_info{" + GRAPH + ',pools="static"}'
COORDINATOR_UP = 'up{job="ampd",namespace="n",component="coordinator",pod="c-0",instance="c-0:9090"}'
DECODE_UP = 'up{job="ampd",namespace="n",component="decode",pod="d-0",instance="d-0:9090"}'


def always(value: float) -> str:
    """A gauge that does not move."""
    return f"{value}x{MINUTES}"


def then(before: float, after: float) -> str:
    """A gauge that changes half-way."""
    return f"{before}x{MINUTES // 2} {after}x{MINUTES // 2}"


def counting(a_minute: float) -> str:
    """A counter that rises evenly."""
    return f"0+{a_minute}x{MINUTES}"


def counting_then(before: float, after: float) -> str:
    """A counter that rises by another step from half-way on."""
    half = MINUTES // 2
    return f"0+{before}x{half} {before * half + after}+{after}x{half}"


# One round a second of which 5 % are late; a prefill worker with a long queue beside one with a short one; clients that
# make mistakes or leave; idle sessions; now and then a read of KV that fails, and a session that the store drops.
WELL: dict[str, str] = {
    COORDINATOR_UP: always(1),
    DECODE_UP: always(1),
    ROUNDS % "met": counting(57),
    ROUNDS % "missed-ttft": counting(3),
    ROUNDS % "missed-itl": counting(0),
    ROUNDS % "abandoned": counting(50),
    ADMISSIONS % ("new", "admitted"): counting(30),
    ADMISSIONS % ("running", "admitted"): counting(30),
    ADMISSIONS % ("new", "wait"): counting(1),
    "ampd_slo_time_to_first_token_seconds{" + GRAPH + "}": always(2),
    ROLE % ("prefill", "p-0"): always(1),
    ROLE % ("decode", "p-0"): always(0),
    ROLE % ("prefill", "p-1"): always(1),
    ROLE % ("decode", "d-0"): always(1),
    WAIT % "p-0": always(9),
    WAIT % "p-1": always(0.5),
    WAIT % "d-0": always(0),
    REQUESTS % ("success", ""): counting(60),
    REQUESTS % ("error", "validation"): counting(30),
    REQUESTS % ("error", "internal"): counting(1),
    LIVE % "decode": always(1),
    LIVE % "prefill": always(2),
    INFO: always(1),
    STATE % "c-0": always(1),
    STATE % "d-0": always(1),
    AGE % ("c-0", "c-0:9090"): always(2),
    LOSSES: f"0x{MINUTES // 2} 1x{MINUTES // 2}",
    FAILED_READS % "history": counting(1),
    READS % "history": counting(60),
    HITS % "device": counting(4000),
    HITS % "store": counting(5000),
    HITS % "recomputed": counting(400),
    EVICTED % "unused": counting(900),
    EVICTED % "surplus": counting(90),
    EVICTED % "idle": counting(5),
    LOST % "idle": counting(60),
    LOST % "evicted": counting(1),
    BOUND: counting(60),
}

OF_GRAPH = {"namespace": "n", "dynamo_namespace": "g"}
Fired = tuple[str, dict[str, str]]
"""An alert that fires, and its labels."""


def critical(alert: str, **labels: str) -> Fired:
    return alert, {"severity": "critical", **labels}


def warning(alert: str, **labels: str) -> Fired:
    return alert, {"severity": "warning", **labels}


ATTAINMENT = "AmpdAttainmentLow"
TARGET = {"job": "ampd", "namespace": "n"}

# story -> what differs from a graph that is well (None: the series is missing), and the alerts that fire at its end.
STORIES: dict[str, tuple[Mapping[str, str | None], list[Fired]]] = {
    "all is well": ({}, []),
    "a fifth of the rounds is late": (
        {ROUNDS % "met": counting_then(57, 45), ROUNDS % "missed-itl": counting_then(0, 15)},
        [warning(ATTAINMENT, **OF_GRAPH)],
    ),
    "most rounds are late": (
        {ROUNDS % "met": counting_then(57, 10), ROUNDS % "missed-itl": counting_then(0, 50)},
        [warning(ATTAINMENT, **OF_GRAPH), critical(ATTAINMENT, **OF_GRAPH)],
    ),
    "two late rounds at night": (
        {
            ROUNDS % "met": always(100),
            ROUNDS % "missed-ttft": f"0x{MINUTES - 3} 1 2 2",
            ROUNDS % "abandoned": always(9),
        },
        [],
    ),
    "rounds were late, and are not any more": (
        {ROUNDS % "met": counting_then(10, 60), ROUNDS % "missed-ttft": counting_then(50, 0)},
        [],
    ),
    "all prefill queues are long": (
        {WAIT % "p-1": then(0.5, 3)},
        [warning("AmpdQueueWaitHigh", role="prefill", **OF_GRAPH)],
    ),
    "every other round is refused": (
        {ADMISSIONS % ("new", "wait"): counting_then(0, 30)},
        [warning("AmpdRoundsRefused", **OF_GRAPH)],
    ),
    "a tenth of the requests meets an overload": ({REQUESTS % ("error", "overload"): counting_then(1, 10)}, []),
    "the frontends fail a tenth": (
        {REQUESTS % ("error", "internal"): counting_then(1, 10)},
        [critical("AmpdFrontendErrors", namespace="n")],
    ),
    "the only coordinator hangs": (
        {COORDINATOR_UP: then(1, 0)},
        [
            critical("AmpdCoordinatorDown", namespace="n"),
            warning("AmpdProcessDown", component="coordinator", pod="c-0", instance="c-0:9090", **TARGET),
        ],
    ),
    "there is no coordinator": (
        {COORDINATOR_UP: None},
        [critical("AmpdCoordinatorDown", job="ampd", component="coordinator")],
    ),
    "a worker hangs": (
        {DECODE_UP: then(1, 0)},
        [warning("AmpdProcessDown", component="decode", pod="d-0", instance="d-0:9090", **TARGET)],
    ),
    "mixed workers take the place of both": (
        {LIVE % "decode": then(2, 0), LIVE % "prefill": then(2, 0), LIVE % "mixed": always(2)},
        [],
    ),
    "the decode workers go": ({LIVE % "decode": then(2, 0)}, [critical("AmpdNoDecodeWorker", **OF_GRAPH)]),
    "the prefill workers go": ({LIVE % "prefill": then(2, 0)}, [warning("AmpdNoPrefillWorker", **OF_GRAPH)]),
    "there never was a prefill worker": ({LIVE % "prefill": always(0)}, []),
    "the pools need no prefill worker": (
        {LIVE % "prefill": then(2, 0), INFO: None, INFO.replace("static", "slo"): always(1)},
        [],
    ),
    "one process loses Redis": ({STATE % "d-0": then(1, 0)}, [critical("AmpdRedisDown", **OF_GRAPH)]),
    "a coordinator hears nothing": (
        {AGE % ("c-0", "c-0:9090"): then(2, 60)},
        [warning("AmpdViewStale", pod="c-0", instance="c-0:9090", **OF_GRAPH)],
    ),
    "a coordinator is cut off again and again": (
        {LOSSES: counting_then(0, 1)},
        [warning("AmpdStateCutOff", pod="c-0", **OF_GRAPH)],
    ),
    "reads of KV fail": (
        {FAILED_READS % "history": counting_then(1, 20)},
        [warning("AmpdKvReadsFailing", direction="history", **OF_GRAPH)],
    ),
    "sessions are evicted": (
        {LOST % "evicted": counting_then(1, 20)},
        [warning("AmpdSessionsLost", reason="evicted", **OF_GRAPH)],
    ),
    "the stores drop what the next rounds need": (
        {
            HITS % "store": counting_then(5000, 2000),
            HITS % "recomputed": counting_then(400, 3400),
            EVICTED % "idle": counting_then(5, 3000),
        },
        [warning("AmpdKvStoreSmall", **OF_GRAPH)],
    ),
    "the stores drop what no round needs": ({EVICTED % "surplus": counting_then(90, 3000)}, []),
    "history is computed again because a worker went": (
        {HITS % "recomputed": counting_then(400, 3400), EVICTED % "idle": always(0)},
        [],
    ),
}


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The alerts as Prometheus reads them, without their texts: promtool would want to be told every word."""
    spec = yaml.safe_load(ALERTS.read_text())["spec"]
    for group in spec["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


@pytest.fixture(scope="module")
def verdicts(rules: Path) -> dict[str, str]:
    """What one call of `promtool` prints about each story."""
    files = {story: rules.with_name(f"story-{number}.yaml") for number, story in enumerate(STORIES)}
    for story, path in files.items():
        path.write_text(yaml.safe_dump(_promtool_test(story, rules)))
    command = ["promtool", "test", "rules", *map(str, files.values())]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    texts = result.stdout + result.stderr
    parts = dict(re.findall(r"^Unit Testing: +(\S+)\n(.*?)(?=^Unit Testing|\Z)", texts, re.DOTALL | re.MULTILINE))
    assert len(parts) == len(files), texts
    return {story: parts[str(path)].strip() for story, path in files.items()}


@pytest.mark.parametrize("story", STORIES)
def test_the_right_alerts_fire(story: str, verdicts: dict[str, str]) -> None:
    assert verdicts[story] == "SUCCESS"


def _promtool_test(story: str, rules: Path) -> dict[str, Any]:
    changes, fire = STORIES[story]
    series = {name: values for name, values in {**WELL, **changes}.items() if values is not None}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {
                "eval_time": f"{MINUTES}m",
                "alertname": alert,
                "exp_alerts": [{"exp_labels": labels} for name, labels in fire if name == alert],
            }
            for alert in _alerts(rules)
        ],
    }
    return {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [test]}


def test_every_alert_fires_in_some_story(rules: Path) -> None:
    fired = {alert for _, fire in STORIES.values() for alert, _ in fire}
    assert fired == _alerts(rules)


def test_texts_can_be_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(ALERTS.read_text())["spec"]))
    result = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


def _alerts(rules: Path) -> set[str]:
    groups = yaml.safe_load(rules.read_text())["groups"]
    return {rule["alert"] for group in groups for rule in group["rules"]}
