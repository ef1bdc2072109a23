"""Wrong calls of `ampd session`, and how it finds a coordinator."""

from pathlib import Path

import pytest

from ampd.cli.main import main
from ampd.cli.serve.local_graphs import LocalGraph, register
from ampd.cli.session.command import _control_url
from ampd.errors import UserError
from ampd.state.embedded import EmbeddedRedis


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["session", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    return line


@pytest.fixture(autouse=True)
def no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other graph of this machine is found."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("DYN_SYSTEM_PORT", raising=False)


def test_wrong_calls_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "list, show, end" in _refused(capsys)
    assert "unknown sub-command 'stop'" in _refused(capsys, "stop")
    assert "--url" in _refused(capsys, "list")
    assert "does not answer" in _refused(capsys, "list", "--url", "http://127.0.0.1:1")
    assert "does not answer" in _refused(capsys, "list", "--url", "nonsense")
    assert main(["session", "--help"]) == 0


def test_the_coordinator_is_that_of_this_process_or_of_the_graph_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedRedis() as redis:
        graph = LocalGraph(namespace="n", state_url=redis.url, url="http://127.0.0.1:1", perf="tiny-cpu")
        register(graph)
        with pytest.raises(UserError, match="no `ampd serve` runs"):
            _control_url(None)
        register(graph.model_copy(update={"control": "http://127.0.0.1:7"}))
        assert _control_url(None) == "http://127.0.0.1:7"
        monkeypatch.setenv("DYN_SYSTEM_PORT", "9090")
        assert _control_url(None) == "http://127.0.0.1:9090"
    assert _control_url("http://host:1/") == "http://host:1"
