"""What an engine's fingerprint depends on, besides the weights: adapters, types, and not where files lie."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", exc_type=ImportError)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def fingerprint(**settings: Any) -> str:
    from workers.kv.ranks.linker import engine_fingerprint  # its imports warn

    return engine_fingerprint(SimpleNamespace(**settings))


def adapter(folder: Path, weights: bytes) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.bin").write_bytes(weights * 5000)
    return str(folder)


def test_adapters_count_by_their_name_and_contents(tmp_path: Path) -> None:
    first, same, other = (
        adapter(tmp_path / name, weights) for name, weights in (("a", b"1"), ("b", b"1"), ("c", b"2"))
    )
    without = fingerprint(dtype="bfloat16")
    for lora_paths in (lambda path: {"law": path}, lambda path: [f"law={path}"]):
        prints = [fingerprint(dtype="bfloat16", lora_paths=lora_paths(path)) for path in (first, same, other)]
        assert prints[0] == prints[1]
        assert len({without, *prints}) == 3
    assert fingerprint(lora_paths={"law": first}) != fingerprint(lora_paths={"code": first})


@pytest.mark.parametrize("name", ["dtype", "kv_cache_dtype", "quantization", "json_model_override_args"])
def test_types_count(name: str) -> None:
    assert len({fingerprint(), fingerprint(**{name: "a"}), fingerprint(**{name: "b"})}) == 3


def test_what_does_not_change_the_kv_does_not_count() -> None:
    assert fingerprint(dtype="bfloat16", tp_size=2, port=1) == fingerprint(dtype="bfloat16", tp_size=4, port=2)
