"""What a worker reports about the settings of SGLang: a store that does not fit, and a page size of SGLang's choice."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampd.errors import UserError
from ampd.settings import parse_settings
from workers.engines.base import EngineError
from workers.engines.sglang_settings import SglangSettings, create_store, report_page_size


def test_a_store_that_does_not_fit_is_one_line_that_names_the_flag() -> None:
    with pytest.raises(EngineError) as refusal:
        create_store(SglangSettings(model=Path("m"), kv_store_gib=1e6))
    line = str(refusal.value)
    assert line.startswith("--kv-store-gib: a KV store of 1000000.0 GiB does not fit: ")
    assert line.endswith("make the store smaller")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("engine_args", "in_effect", "lines"),
    [("{}", 32, 0), ('{"page_size": 64}', 64, 0), ("{}", 64, 1), ('{"page_size": null}', 64, 1)],
)
def test_another_page_size_than_asked_for_is_one_line(
    caplog: pytest.LogCaptureFixture, engine_args: str, in_effect: int, lines: int
) -> None:
    report_page_size(SglangSettings(model=Path("m"), page_size=32, engine_args=engine_args), in_effect)
    assert len(caplog.records) == lines
    assert all(f"--kv-block-size {in_effect}" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("engine_args", "words"),
    [("{", "not JSON"), ("[]", "must be a JSON object"), pytest.param("[" * 100_000, "not JSON", id="nested")],
)
def test_engine_arguments_that_are_no_object_are_one_line(engine_args: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"^worker: --engine-args: .*{words}") as refusal:
        parse_settings(SglangSettings, ["--model", "m", "--engine-args", engine_args], "worker")
    assert len(str(refusal.value).splitlines()) == 1
