from pathlib import Path

from ampd.cli.doctor.settings import DoctorSettings
from ampd.cli.doctor.trial import _serve_flags
from ampd.cli.serve.settings import EngineName


def test_modelled_engines_take_the_times_that_they_are_compared_with() -> None:
    flags = _serve_flags(DoctorSettings(engine=EngineName.MODELLED), "qwen3-32b-h20", Path("logs"))
    assert flags[flags.index("--perf") + 1] == "qwen3-32b-h20"
