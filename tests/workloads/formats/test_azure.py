"""Azure: each row is a session of one round."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampd.errors import UserError

from .lab import NOTES, load, shape


def test_azure_rows_are_single_rounds(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,0,8\n2023-11-16 18:17:05.9799600,110,27\n"
    )
    first, second = load("azure", path)
    assert shape(first) == [(4808, 10, 0.0, None)]
    assert second.arrival_s == 2.0
    assert "1 requests without tokens" in NOTES[0]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,-3,10\n")
    with pytest.raises(UserError, match=r"a\.csv:2: ContextTokens must be a count from 0 to \d+ \(found: -3.0\)"):
        load("azure", path)


@pytest.mark.parametrize(
    ("rows", "arrivals_s"),
    [
        ("2024-05-10 00:00:09.1+00:00,109,5\n2024-05-10 00:00:08.000001+00:00,108,5\n", [0.0, 1.099999]),
        ("2024-05-10 00:00:00.5+00:00,2162.0,5.0\n2024-05-10 02:00:01.123456789+02:00,100.0,7\n", [0.0, 0.623456]),
        ("2024-05-10T00:00:00Z,9,5\n2024-05-10 00:00:01.25 UTC,9,7\n2024-05-10 00:00:02+0000,9,7\n", [0.0, 1.25, 2.0]),
        ("1715299200,9,5\n1715299201500,9,7\n", [0.0, 1.5]),
    ],
)
def test_rows_of_any_order_fraction_and_zone_have_their_arrivals(
    tmp_path: Path, rows: str, arrivals_s: list[float]
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    assert [session.arrival_s for session in load("azure", path)] == pytest.approx(arrivals_s, abs=1e-6)


def test_a_folder_of_several_traces_is_refused(tmp_path: Path) -> None:
    for name in ("code", "conv"):
        (tmp_path / f"{name}.csv").write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n"
        )
    with pytest.raises(UserError, match=r"holds 2 traces; convert one at a time: code\.csv, conv\.csv"):
        load("azure", tmp_path)
    assert len(load("azure", tmp_path / "conv.csv")) == 1
