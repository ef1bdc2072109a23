"""The HTML report: complete, self-contained, and fit for results without routes, SLO or rounds."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from ampd.types import Slo
from workloads.report import render_report
from workloads.results import PromptTokens, RoundRecord, summarise

SLO = Slo(0.11, 0.1)


def _records(route: str | None) -> list[RoundRecord]:
    decision = {"route": route, "reason": "cheapest"} if route else {}
    good = [
        RoundRecord(f"s{n}", r, n + r, PromptTokens(10, 5), 3, 0.1 + r / 50, [0.01, 0.02], 0.2, decision=decision)
        for n in range(3)
        for r in range(2)
    ]
    return [*good, RoundRecord("<bad>", 0, 1.5, PromptTokens(0, 5), error="<script>alert(1)</script>")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("route", "slo"),
    [
        ("remote", SLO),
        (None, None),
        pytest.param("remote", None, marks=pytest.mark.slow),
        pytest.param(None, SLO, marks=pytest.mark.slow),
    ],
)
def test_report_is_self_contained(route: str | None, slo: Slo | None) -> None:
    records = _records(route)
    result = summarise(records, {"s0": 2, "s1": 2, "s2": 2, "<bad>": 1}, slo, 4.0)
    page = render_report(result, records)
    parser = HTMLParser()
    parser.feed(page)
    assert "<script" not in page
    assert ".card { overflow: visible; }" in page, "paper does not scroll"
    assert not re.search(r"""(?:src|href)=["']https?:|url\(["']?https?:|@import""", page)
    assert page.count("<svg") == 3
    assert ("reports no routes" in page) is (route is None)
    assert ("42.9%" in page) is (slo is not None)  # 3 of 7 rounds


@pytest.mark.slow
def test_missed_rounds_are_listed_and_marked() -> None:
    records = _records("remote")
    planned = {"s0": 2, "s1": 2, "s2": 2, "<bad>": 1}
    page = render_report(summarise(records, planned, SLO, 4.0), records)
    assert "Rounds that missed a target (4)" in page
    assert "TTFT 120 ms of 110 ms" in page
    assert "remote (cheapest)" in page
    assert page.count("missed a target</text>") == 1  # in the legend of the timeline
    assert "42.9% of the rounds had their first token within 110 ms" in page
    without = render_report(summarise(records, planned, None, 4.0), records)
    assert "missed a target</text>" not in without
    assert "Rounds that missed" not in without


@pytest.mark.slow
def test_a_long_list_is_cut_with_a_note() -> None:
    records = [RoundRecord(f"s{number}", 0, number, PromptTokens(0, 5), 3, 1.0, [0.01], 1.1) for number in range(250)]
    page = render_report(summarise(records, {}, SLO, 250.0), records)
    assert page.count("TTFT 1,000 ms of 110 ms") == 200
    assert "50 later ones are not listed" in page


@pytest.mark.slow
def test_a_page_can_be_dark_and_printed() -> None:
    records = _records("local")
    page = render_report(summarise(records, {}, SLO, 4.0), records)
    assert "prefers-color-scheme: dark" in page
    assert "print-color-adjust: exact" in page
    drawn = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert "currentColor" in drawn
    for colour in ("#000000", "#1c2231", "#3a3f4b", "#e6e9ef"):
        assert colour not in drawn


def test_a_run_without_rounds_still_renders() -> None:
    page = render_report(summarise([], {}, Slo(1, 1), 0.0), [])
    assert "0 sessions" in page
