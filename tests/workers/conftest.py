"""What the worker tests share."""

from pathlib import Path

import pytest

from ampd.tiny_model import TinyModel, make_tiny_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model made on the spot; its weights do not matter here."""
    sizes = TinyModel(layers=1, hidden_size=32, heads=2, kv_heads=1, head_dim=16, max_context_tokens=4096)
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", sizes)
