"""The contest of policies: what is searched, what is kept, what is said."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import pytest

from ampd.errors import UserError
from ampd.perf.presets import analytic_model
from ampd.types import Parallelism, Slo
from benchmarks.policies import campaign
from benchmarks.policies.__main__ import run as command
from benchmarks.policies.arrivals import recorded_arrivals
from benchmarks.policies.campaign import Ledger, Task, search_all
from benchmarks.policies.contest import USUAL, Condition, Contestant, Found, Point, measure, run, time_at_targets_s
from benchmarks.policies.contestants import ABLATION, ALL, ALWAYS_REMOTE, COLOCATED, OURS
from benchmarks.policies.intervals import geometric_interval, geometric_mean, mean_interval
from benchmarks.policies.plots import relative
from benchmarks.policies.prepared import Prepared
from benchmarks.policies.report import put_between_markers
from benchmarks.policies.settings import Setting, paper_settings, real_settings
from benchmarks.policies.standings import Standings
from workloads.trace import Round, Session

TINY = Setting("llama-3.1-8b", "h100", "tau-bench-airline", "1xTP1", "1xTP1", 0.3, 0.02, duration_s=5.0)


# -- the figures


def test_a_confidence_interval_is_students() -> None:
    # The table's quantile for four degrees of freedom and 95 % is 2.776.
    mean, half, seeds = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean, seeds) == (3.0, 5)
    assert half == pytest.approx(2.776 * (2.5**0.5) / 5**0.5, rel=1e-3)


def test_one_value_has_no_interval() -> None:
    assert mean_interval([2.0]) == (2.0, inf, 1)
    assert geometric_interval([2.0]) == (pytest.approx(2.0), 0.0, inf)


def test_a_ratios_interval_is_symmetric_in_its_inverse() -> None:
    mean, low, high = geometric_interval([1.0, 2.0, 4.0])
    back, back_low, back_high = geometric_interval([1.0, 0.5, 0.25])
    assert mean == pytest.approx(2.0)
    assert (1 / back, 1 / back_high, 1 / back_low) == (pytest.approx(mean), pytest.approx(low), pytest.approx(high))


def test_a_geometric_mean_of_a_zero_is_zero() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert geometric_mean([0.0, 4.0]) == 0.0


def test_time_at_targets_counts_tools_and_tokens() -> None:
    rounds = (Round(incr_tokens=5, output_tokens=11), Round(incr_tokens=5, output_tokens=1, tool_s=3.0))
    session = Session(session_id="s", arrival_s=9.0, rounds=rounds)
    assert time_at_targets_s(session, Slo(0.5, 0.1)) == pytest.approx(0.5 + 1.0 + 3.0 + 0.5)


@pytest.mark.parametrize("kind", ["conversation", "coding"])
def test_recorded_arrivals_have_the_rate_and_the_seeds_place(kind: str) -> None:
    arrivals = recorded_arrivals(kind, 500, 4.0, 1)
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert 499 / arrivals[-1] == pytest.approx(4.0)
    assert recorded_arrivals(kind, 500, 4.0, 1) == arrivals != recorded_arrivals(kind, 500, 4.0, 2)


def test_starving_is_not_sustained() -> None:
    sessions, done = run(TINY, ALWAYS_REMOTE, 1.0, 0)
    fine = measure(TINY, sessions, done)
    assert fine.in_time == 1.0
    assert fine.sustained_rounds == fine.rounds > 0.9
    victims = {session.session_id for session in sessions[:2]}
    late = [record for record in done.rounds if record.session_id in victims and record.index == 0]
    assert len(late) == 2
    for each in late:
        assert each.e2e_s is not None
        each.e2e_s += 1_000.0
    starved = measure(TINY, sessions, done)
    assert starved.rounds == fine.rounds
    assert starved.in_time == pytest.approx(1 - 2 / len(sessions))
    assert starved.sustained_rounds == 0.0


# -- who takes part


def test_every_contestant_and_every_ablation_exists() -> None:
    assert len({each.label for each in ALL}) == len(ALL)
    # Ours with fixed roles takes part in both.
    assert len({each.spec for each in (*ALL, *ABLATION)}) == len(ALL) + len(ABLATION) - 1
    assert not any("," in each.label for each in ALL), "flags list them with commas"
    for each in (*ALL, *ABLATION):
        each.policies("default" if each.is_fitted else None)


def test_settings_differ_and_fit_their_gpus() -> None:
    settings = [*paper_settings(), *real_settings()]
    assert len(set(settings)) == len({setting.name + setting.gpu for setting in settings}) == len(settings)
    assert [setting.gpus for setting in paper_settings()] == [8, 32, 8, 16] * 3


def test_beliefs_are_wrong_only_for_the_policies() -> None:
    model, theta = analytic_model("llama-3.1-8b", "h100"), Parallelism(1)
    assert Condition("x", belief="1").believed(model, 0) is model
    slow = Condition("x", belief="1.3").believed(model, 0)
    assert slow.prefill_s(0, 500, theta) == pytest.approx(1.3 * model.prefill_s(0, 500, theta))
    random_ones = [Condition("x", belief="random").believed(model, seed) for seed in (1, 1, 2)]
    factors = [each.decode_step_s(1, 9, theta) / model.decode_step_s(1, 9, theta) for each in random_ones]
    assert factors[0] == factors[1] != factors[2]
    assert all(0.7 <= factor <= 1.3 for factor in factors)

    # Without a choice to make, a wrong belief changes nothing.
    for blind in (ALWAYS_REMOTE, replace(ALWAYS_REMOTE, routing="always-local")):
        true, wrong = (run(TINY, blind, 8.0, 0, Condition("x", belief=factor))[1] for factor in ("1", "0.1"))
        assert true.rounds == wrong.rounds
    seen, misled = (run(TINY, OURS, 12.0, 0, Condition("x", belief=factor))[1] for factor in ("1", "0.3"))
    assert [record.route for record in seen.rounds] != [record.route for record in misled.rounds]


# -- what is kept


@dataclass
class Counted:
    """A search that takes no time, counted."""

    calls: int = 0

    def __call__(self, _: Setting, contestant: Contestant, seed: int, *__: object) -> Found:
        self.calls += 1
        value = 1.0 if contestant == OURS else 0.4
        goodput = dict.fromkeys(("rounds", "sessions", "sustained_rounds", "sustained_sessions"), value + seed / 10)
        return Found(goodput, {value: Point(1.0, 1.0, 1.0, 2.0, 2.0, 0.0)})


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found = Counted()
    monkeypatch.setattr(campaign, "find", found)
    monkeypatch.setattr(Prepared, "reference_rate", lambda *_: 1.0)
    return found


PAIRS = [(TINY, OURS, USUAL), (TINY, ALWAYS_REMOTE, USUAL)]


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, counted: Counted) -> None:
    data = tmp_path / "data.jsonl"
    search_all(Ledger(data), PAIRS, 3, Prepared(tmp_path), 1)
    assert counted.calls == 6
    lines = data.read_text().splitlines(keepends=True)
    # The last but one is gone, the last was cut while it was written.
    data.write_text("".join([*lines[:4], lines[5][:40]]))
    ledger = Ledger(data)
    assert len(ledger.results) == 4
    search_all(ledger, PAIRS, 3, Prepared(tmp_path), 1)
    assert counted.calls == 8
    assert sorted(data.read_text().splitlines(keepends=True)) == sorted(lines)
    search_all(Ledger(data), PAIRS, 3, Prepared(tmp_path), 1)
    assert counted.calls == 8
    search_all(Ledger(data, frozenset({"ours"})), PAIRS, 3, Prepared(tmp_path), 1)
    assert counted.calls == 11


def test_a_data_file_of_something_else_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"some": "thing"}\n')
    with pytest.raises(UserError, match=re.escape("data.jsonl, line 1: is no result")):
        Ledger(data)


def test_who_is_far_behind_gets_no_further_seeds(tmp_path: Path, counted: Counted) -> None:
    ledger = Ledger(None)
    search_all(ledger, PAIRS, 3, Prepared(tmp_path), 1, race=0.5)
    assert counted.calls == 4
    assert ledger.found(Task(TINY, OURS, 2)) is not None
    assert ledger.found(Task(TINY, ALWAYS_REMOTE, 1)) is None


@pytest.mark.usefixtures("counted")
def test_results_belong_to_policies_and_not_to_labels(tmp_path: Path) -> None:
    ledger = Ledger(None)
    search_all(ledger, PAIRS, 1, Prepared(tmp_path), 1)
    assert ledger.found(Task(TINY, replace(OURS, label="another name"), 0)) is not None
    assert ledger.found(Task(TINY, replace(OURS, slicing="whole"), 0)) is None
    assert ledger.found(Task(replace(TINY, ttft_s=0.4), OURS, 0)) is None


# -- what is said


@pytest.mark.usefixtures("counted")
def test_standings_compare_seed_by_seed(tmp_path: Path) -> None:
    ledger = Ledger(None)
    search_all(ledger, [*PAIRS, (TINY, COLOCATED, USUAL)], 2, Prepared(tmp_path), 1)
    standings = Standings(ledger, [TINY], [OURS, ALWAYS_REMOTE, COLOCATED], 2)
    assert standings.rivals == [ALWAYS_REMOTE]
    assert standings.best(TINY, standings.rivals, "rounds") == ALWAYS_REMOTE
    ratio = standings.ratio(TINY, OURS, ALWAYS_REMOTE, "rounds")
    assert ratio is not None
    assert ratio[0] == pytest.approx((1.0 / 0.4 * 1.1 / 0.5) ** 0.5)
    assert standings.ratio(TINY, OURS, None, "rounds") is None
    assert relative(standings, [TINY], ALWAYS_REMOTE, "rounds") == pytest.approx(0.45 / 1.05)


def test_a_rival_that_carries_nothing_is_no_best_and_no_ratio() -> None:
    ledger = Ledger(None)
    for our, value in ((OURS, 2.0), (ALWAYS_REMOTE, 0.0)):
        ledger.keep(Task(TINY, our, 0), Found({"rounds": value}, {}), 0.0)
    standings = Standings(ledger, [TINY], [OURS, ALWAYS_REMOTE], 1)
    assert standings.best(TINY, standings.rivals, "rounds") is None
    assert standings.ratio(TINY, OURS, ALWAYS_REMOTE, "rounds") is None
    assert relative(standings, [TINY], ALWAYS_REMOTE, "rounds") == pytest.approx(0.01)


def test_only_the_marked_part_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("a\n<!-- tables: begin -->\nold\n<!-- tables: end -->\nb\n<!-- x: begin -->\nc\n<!-- x: end -->\n")
    put_between_markers(path, "tables", "new")
    assert path.read_text() == (
        "a\n<!-- tables: begin -->\n\nnew\n\n<!-- tables: end -->\nb\n<!-- x: begin -->\nc\n<!-- x: end -->\n"
    )


# -- the command


FLAGS = ["--settings", "real", "--only", "8b tau", "--duration", "5", "--contestants", "always-remote", "--jobs", "1"]


@pytest.mark.slow
def test_the_command_writes_tables_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, page, data = tmp_path / "page.md", tmp_path / "page.html", tmp_path / "data.jsonl"
    document.write_text("<!-- tables: begin --><!-- tables: end -->\n")
    kept = ["--seeds", "2", "--data", str(data), "--cache", str(tmp_path / "cache")]
    assert command([*FLAGS, *kept, "--write", str(document), "--page", str(page)]) == 0
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert {(row["contestant"], row["seed"]) for row in rows} == {
        (label, seed) for label in ("ours", "always-remote") for seed in (0, 1)
    }
    for row in rows:
        goodput, points = row["goodput"], {float(rate): point for rate, point in row["points"].items()}
        assert 0 < goodput["sessions"] <= goodput["rounds"]
        assert goodput["sustained_rounds"] <= goodput["rounds"]
        assert points[goodput["rounds"]]["rounds"] >= 0.9
        assert min(rate for rate, point in points.items() if point["rounds"] < 0.9) <= 1.05 * goodput["rounds"]
    text = document.read_text()
    assert "### Goodput of rounds: ours against others, by setting" in text
    assert re.search(r"\| llama-3.1-8b tau-bench-airline 1xTP1\+1xTP1 \| [\d.]+ ± [\d.]+ \|", text)
    html = page.read_text()
    assert html.count("<svg") == 3 + 2
    assert not re.search(r"(?:src|href)=\"http", html)
    before = data.read_text()
    assert command([*FLAGS, *kept]) == 0
    assert data.read_text() == before
    assert "Sustained goodput of sessions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--contestants", "nobody"], "unknown contestant 'nobody'"),
        (["--settings", "moon"], "unknown group 'moon'"),
        (["--study", "nothing"], "unknown study 'nothing'"),
        (["--only", "nowhere", "--settings", "paper"], "no setting's name contains 'nowhere'"),
    ],
)
def test_wrong_flags_are_one_line(flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        command([*flags, "--cache", str(tmp_path)])


def test_a_document_without_markers_is_refused_before_any_work(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("nothing\n")
    with pytest.raises(UserError, match="has no lines <!-- tables: begin -->"):
        command([*FLAGS, "--write", str(document)])
