"""The settings of the contest."""

from __future__ import annotations

from benchmarks.policies.settings import paper_settings, real_settings


def test_settings_differ_and_fit_their_gpus() -> None:
    settings = [*paper_settings(), *real_settings()]
    assert len(set(settings)) == len({setting.name + setting.gpu for setting in settings}) == len(settings)
    assert [setting.gpus for setting in paper_settings()] == [8, 32, 8, 16] * 3
