"""What the figures of the product's structure count. `tests/test_structure.py` holds the limits."""

from pathlib import Path

from benchmarks.structure import measured


def test_a_class_with_too_many_parameters_or_fields_is_found(tmp_path: Path) -> None:
    for package in ("ampd", "planner", "router", "workers", "workloads"):
        (tmp_path / package).mkdir()
    parameters = ", ".join(f"p{number}" for number in range(9))
    fields = "".join(f"        self.f{number} = 0\n" for number in range(13))
    (tmp_path / "ampd" / "large.py").write_text(
        f"class Wide:\n    def __init__(self, {parameters}):\n        self.all = p0\n\n\n"
        f"class Deep:\n    def __init__(self):\n{fields}\n\n"
        "class Small:\n    def __init__(self, p0):\n        self.p = p0\n"
    )
    over = measured(tmp_path)["classes_over_limit"]
    assert sorted(line.rpartition(":")[2] for line in over) == ["Deep", "Wide"]
