"""docs/guide.md says what the settings say."""

import re
from pathlib import Path

from router.settings import CoordinatorSettings

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"


def test_rounds_in_progress_have_the_documented_time_after_ctrl_c() -> None:
    in_one_line = " ".join(GUIDE.read_text(encoding="utf-8").split())
    documented = re.search(r"rounds in progress have finished, for which they have (\d+) s", in_one_line)
    assert documented
    assert float(documented[1]) == CoordinatorSettings.model_fields["drain_s"].default
