"""How AMPD is installed: from its repository. On PyPI the name `ampd` is another project."""

import os
import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_FOREIGN = re.compile(r"install\b[^\n]*?(?<![\w./-])ampd(\[|['\"`\s]*$)", re.MULTILINE)
_KINDS = {".md", ".py", ".sh", ".toml", ".yaml", ".j2", ""}
_SKIPPED = {"node_modules", "out", "build", "logs"}


def _texts() -> dict[str, str]:
    found: dict[str, str] = {}
    for folder, folders, files in os.walk(_ROOT):
        folders[:] = [name for name in folders if name not in _SKIPPED and (name == ".ci" or not name.startswith("."))]
        for path in (Path(folder, name) for name in files if Path(name).suffix in _KINDS):
            if path != Path(__file__):
                found[str(path.relative_to(_ROOT))] = path.read_text("utf-8", errors="replace")
    return found


def test_no_text_installs_the_other_project() -> None:
    texts = _texts()
    assert {"README.md", "Makefile", "docs/clients.md", "ampd/cli/serve/settings.py"} <= texts.keys()
    assert [f"{path}: {found[0]}" for path, text in texts.items() for found in _FOREIGN.finditer(text)] == []


def test_the_search_finds_such_a_line() -> None:
    for line in ("pip install 'ampd[sglang]'", "uv pip install --upgrade ampd", 'fix = "pip install ampd[x], or"'):
        assert _FOREIGN.search(line), line
    for line in ("uv pip install --editable '.[sglang]'", "install it, then run ampd serve"):
        assert not _FOREIGN.search(line), line
