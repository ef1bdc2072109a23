"""The README's `ampd serve` and its request, as they stand there, on a machine without a GPU."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from ampd.tiny_model import TinyModel, make_tiny_model
from tools.demo import running_graph

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]

README = Path(__file__).parents[2] / "README.md"
HOST = "http://127.0.0.1:8000"
FOLDER = "/models/Qwen3-8B"


def typed(command: str) -> list[str]:
    """The words behind a command that the README tells to type once."""
    text = README.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(rf"^\$ {re.escape(command)} (.*)$", text, re.MULTILINE)
    return shlex.split(line)


def ready_line(perf: str) -> str:
    """A pattern of the line that the README shows."""
    text = README.read_text(encoding="utf-8")
    (shown,) = re.findall(r"^ready: .*?stops it$", text, re.MULTILINE | re.DOTALL)
    shown = re.escape(" ".join(shown.split()).replace(f"{FOLDER}@h200", perf).replace(HOST, "HOST"))
    return shown.replace(r"\.\.\.", ".+").replace("HOST", r"http://127\.0\.0\.1:\d+")


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(["--engine", "modelled"], id="modelled"),
        pytest.param([], id="the-default", marks=pytest.mark.long),
    ],
)
def test_the_readme_s_graph_answers_its_curl(engine: list[str], tmp_path: Path) -> None:
    if not engine:
        pytest.importorskip("sglang")
    folder = make_tiny_model(tmp_path / Path(FOLDER).name, TinyModel(max_context_tokens=512))
    serve = [str(folder) if word == FOLDER else word for word in typed(".venv/bin/ampd serve")]
    lines: list[str] = []
    # The README: without a GPU `--perf` is needed.
    with running_graph([*serve, *engine, "--perf", "tiny-cpu", "--port", "0"], lines.append) as url:
        words = [word.replace(HOST, url) for word in typed("curl")]
        done = subprocess.run(["curl", *words], capture_output=True, text=True, timeout=300, check=True)
    assert str(folder) in serve
    assert url in words[0]
    assert re.fullmatch(ready_line("tiny-cpu"), lines[-1]), lines[-1]
    answer = json.loads(done.stdout)
    assert answer["model"] == folder.name
    (choice,) = answer["choices"]
    assert choice["finish_reason"] in ("stop", "length")
    assert choice["message"]["content"]
