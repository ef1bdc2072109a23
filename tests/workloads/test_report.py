"""The HTML report: complete, self-contained, and fit for results without routes, targets or rounds."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ampd.types import Slo
from workloads.report import figures, sections, series_of, shortened, write_replay_report
from workloads.results import PromptTokens, RoundRecord, summarise

SLO = Slo(0.11, 0.1)
PLANNED = {"s0": 2, "s1": 2, "s2": 2, "<bad>": 1}
SETTINGS = {"trace": "t.jsonl", "url": "http://here", "model": "m", "finished": "now", "rate": None}


def _records(route: str | None) -> list[RoundRecord]:
    decision = {"route": route, "reason": "cheapest"} if route else {}
    good = [
        RoundRecord(f"s{n}", r, n + r, PromptTokens(10, 5), 3, 0.1 + r / 50, [0.01, 0.02], 0.2, decision=decision)
        for n in range(3)
        for r in range(2)
    ]
    return [*good, RoundRecord("<bad>", 0, 1.5, PromptTokens(0, 5), error="<script>alert(1)</script>")]


def _result(records: list[RoundRecord], slo: Slo | None, planned: dict[str, int] = PLANNED) -> dict[str, Any]:
    result = summarise(records, planned, slo, 4.0) | {"interrupted": False, "settings": SETTINGS}
    return json.loads(json.dumps(result | {"series": series_of(records, slo)}))


def _page(tmp_path: Path, result: dict[str, Any]) -> str:
    write_replay_report(tmp_path / "report.html", result)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("slo", [SLO, None])
@pytest.mark.parametrize("route", ["remote", None])
def test_report_is_self_contained(route: str | None, slo: Slo | None, tmp_path: Path) -> None:
    page = _page(tmp_path, _result(_records(route), slo))
    parser = HTMLParser()
    parser.feed(page)
    assert "<script>alert" not in page
    assert "The MIT License" in page
    assert not re.search(r"""(?:src|href)=["']https?:|url\(["']?https?:|@import""", page)
    assert page.count('<div class="chart">') == 11
    assert ("Routes and reasons" in page) is (route is not None)
    assert ("42.9%" in page) is (slo is not None)  # 3 of 7 rounds
    assert ("Targets: TTFT 110 ms, ITL 100 ms." in page) is (slo is not None)


def test_no_name_in_a_chart_ends_its_script(tmp_path: Path) -> None:
    records = [RoundRecord("</script><b>", 0, 0.0, PromptTokens(1, 1), 2, 0.1, [0.1], 0.2)]
    page = _page(tmp_path, _result(records, SLO, {}))
    for text in re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL):
        assert "<" not in text
        json.loads(text)


def test_missed_rounds_are_listed_and_marked(tmp_path: Path) -> None:
    page = _page(tmp_path, _result(_records("remote"), SLO))
    assert "Rounds that missed a target (4)" in page
    assert "TTFT 120 ms of 110 ms" in page
    assert "remote (cheapest)" in page
    without = _page(tmp_path, _result(_records("remote"), None))
    assert "missed a target" not in without.replace("Hollow: the round missed a target.", "")


def test_a_long_list_is_cut_with_a_note(tmp_path: Path) -> None:
    records = [RoundRecord(f"s{number}", 0, number, PromptTokens(0, 5), 3, 1.0, [0.01], 1.1) for number in range(250)]
    page = _page(tmp_path, _result(records, SLO, {}))
    assert page.count("TTFT 1,000 ms of 110 ms") == 100
    assert "150 later ones are not listed" in page


def test_a_report_of_many_sessions_is_small(tmp_path: Path) -> None:
    """With names as long as those of UUIDs, a tenth of the rounds late and an error of each session."""
    records = [
        RoundRecord(
            f"{number:032x}",
            index,
            number + index / 7,
            PromptTokens(0, 100 + number),
            2 + number % 50,
            0.2 if number % 10 == 0 else 0.01 + number % 97 / 1e3,
            [0.0123],
            0.5 + number % 31 / 7,
            error=f"error {number}: " + "x" * 400 if index == 3 else None,
        )
        for number in range(10_000)
        for index in range(4)
    ]
    page = _page(tmp_path, _result(records, SLO, {f"{number:032x}": 4 for number in range(10_000)}))
    assert "10000 sessions" in page
    assert len(page.encode()) < 2e6


def test_a_page_can_be_dark_and_printed(tmp_path: Path) -> None:
    page = _page(tmp_path, _result(_records("local"), SLO))
    assert "prefers-color-scheme: dark" in page
    assert "print-color-adjust: exact" in page
    assert ".scroll { overflow: visible; background: none; }" in page, "paper does not scroll"


def test_a_run_without_rounds_still_renders(tmp_path: Path) -> None:
    assert "0 sessions" in _page(tmp_path, _result([], Slo(1, 1), {}))


def test_runs_beside_each_other_tell_the_change_from_the_first() -> None:
    slow = [RoundRecord("a", 0, 0.0, PromptTokens(0, 5), 3, 0.2, [0.01], 0.3)]
    fast = [RoundRecord("a", 0, 0.0, PromptTokens(0, 5), 3, 0.1, [0.01], 0.2)]
    runs = {"slow": _result(slow, SLO, {"a": 1}), "fast": _result(fast, SLO, {"a": 1})}
    rows = {row[0]: row[1:] for row in figures(runs)}
    assert rows["rounds within both targets"] == ["0.0%", "100.0% (+100.0)"]
    assert rows["TTFT P95, ms"] == ["200.0", "100.0 (-50%)"]
    assert rows["mean ITL P95, ms"] == ["10.0", "10.0"]
    assert "TTFT P95, incremental prefills, ms" not in rows
    assert [section.title for section in sections(runs)][2] == "TTFT of initial prefills"
    assert any("the change from slow" in line for line in sections(runs)[0].text)


def test_a_long_name_keeps_its_beginning_and_its_end() -> None:
    assert shortened("short") == "short"
    assert shortened("a" * 40 + "b" * 40) == "aaaaaaaaaaaaa...bbbbbbbbbbbbb"
