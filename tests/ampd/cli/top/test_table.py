from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from ampd.cli.top_screen import MISSED, Cell, Column, fitting, table

columns = st.lists(
    st.builds(
        Column,
        st.text(max_size=6),
        st.integers(1, 12),
        st.integers(0, 9),
        st.sampled_from([lambda row: row["text"], lambda row: Cell(row["text"], is_missed=True)]),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@given(columns, st.lists(st.text(max_size=20), max_size=4), st.integers(1, 60))
def test_lines_are_as_long_as_allowed_and_have_the_same_columns(
    columns: list[Column], texts: list[str], width: int
) -> None:
    lines = table(columns, [{"text": text} for text in texts], width)
    assert len(lines) == (len(texts) + 1 if texts else 0)
    assert all(cell_len(line.plain) <= width and line.plain.isprintable() for line in lines)


def test_only_what_misses_its_target_is_marked() -> None:
    columns = [Column("a", 4, 0, lambda row: Cell(row["a"], is_missed=True)), Column("b", 4, 0, lambda row: row["b"])]
    _, line = table(columns, [{"a": "7", "b": "8"}], 40)
    assert [line.plain[span.start : span.end].strip() for span in line.spans if span.style == MISSED] == ["7"]


def test_columns_that_matter_least_go_first() -> None:
    columns = [Column(title, 4, keep, lambda row: row["x"]) for title, keep in zip("iabc", (0, 3, 1, 2), strict=True)]
    kept = ["".join(column.title for column in fitting(columns, width)) for width in (19, 18, 13, 9, 1)]
    assert kept == ["iabc", "iac", "ia", "ia", "i"]
