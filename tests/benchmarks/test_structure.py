"""What the figures of the product's size count. `tests/test_structure.py` holds the bounds."""

from pathlib import Path

from benchmarks.structure import measured


def test_code_modules_flags_and_words_are_counted(tmp_path: Path) -> None:
    (tmp_path / "ampd").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "ampd" / "small.py").write_text(
        '"""A text\n\nof three lines."""\n\n# a comment\nNAME = "text"\n\n\n'
        'def say() -> str:\n    """One."""\n    return NAME\n'
    )
    (tmp_path / "docs/configuration.md").write_text("| flag | |\n| `--first` | what it does |\n| `--second` | |\n")
    (tmp_path / "README.md").write_text("four words of text\n")
    assert measured(tmp_path) == {"lines_of_code": 3, "modules": 1, "flags": 2, "words_of_pages": 4 + 3 + 8 + 4}
