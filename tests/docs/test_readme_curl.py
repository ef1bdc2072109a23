"""The README's request, as it stands there, against a graph as it starts there without a GPU."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.demo import running_graph

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]

README = Path(__file__).parents[2] / "README.md"
HOST = "http://127.0.0.1:8000"


def commands() -> list[list[str]]:
    """The calls of curl that the README tells to type, as words."""
    text = README.read_text(encoding="utf-8").replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^\$ (curl .*)$", text, re.MULTILINE)]


def test_the_answer_to_the_readme_s_curl_ends() -> None:
    (command,) = commands()
    model = json.loads(command[command.index("-d") + 1])["model"]
    flags = ["--engine", "modelled", "--port", "0", "--model-name", model]
    with running_graph(flags, print) as url:
        words = [word.replace(HOST, url) for word in command]
        assert words != command
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    (choice,) = json.loads(done.stdout)["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"]
