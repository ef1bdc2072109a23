"""Wrong calls of `ampd session`, and how it finds a coordinator."""

import json
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ampd.cli.main import main
from ampd.cli.session import ListSettings, _asked, _controls
from ampd.errors import UserError
from ampd.settings import parse_settings
from ampd.state.embedded import EmbeddedRedis, LocalGraph, register, servers_folder

UNKNOWN = {"session_key": "0" * 32, "was_bound": False, "released_tokens": 0}
DEAD = "http://127.0.0.1:1"


class NoSession(BaseHTTPRequestHandler):
    """Answers as a coordinator that knows no session."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(UNKNOWN).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def coordinator() -> Iterator[str]:
    """The URL of a coordinator that knows no session."""
    with ThreadingHTTPServer(("127.0.0.1", 0), NoSession) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["session", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    return line


@pytest.fixture(autouse=True)
def no_graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No other graph of this machine is found."""
    monkeypatch.delenv("DYN_SYSTEM_PORT", raising=False)
    # `tmp_path` is too long for a socket: then servers would be in /tmp, where another test may run a graph.
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        assert servers_folder() == Path(folder)
        yield


def test_wrong_calls_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "list, show, end" in _refused(capsys)
    assert "unknown sub-command 'stop'" in _refused(capsys, "stop")
    assert "--coordinator-url" in _refused(capsys, "list")
    assert "does not answer" in _refused(capsys, "list", "--coordinator-url", DEAD)
    assert "does not answer" in _refused(capsys, "list", "--coordinator-url", "nonsense")
    assert main(["session", "--help"]) == 0


def test_the_coordinator_is_that_of_this_process_or_of_the_graph_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedRedis() as redis:
        graph = LocalGraph(namespace="n", state_url=redis.url, url=DEAD, perf="tiny-cpu", token="t")
        register(graph)
        with pytest.raises(UserError, match="no `ampd serve` with system ports runs"):
            _controls(None)
        controls = ("http://127.0.0.1:7", "http://127.0.0.1:8")
        register(graph.model_copy(update={"controls": controls}))
        assert _controls(None) == (controls, "t")
        with EmbeddedRedis() as other:
            register(graph.model_copy(update={"state_url": other.url, "controls": (DEAD,)}))
            with pytest.raises(UserError, match="several graphs run"):
                _controls(None)
            register(graph.model_copy(update={"controls": controls, "url": "http://127.0.0.1:2"}))
            assert _controls(None, "http://127.0.0.1:2") == (controls, "t")
        monkeypatch.setenv("DYN_SYSTEM_PORT", "9090")
        assert _controls(None) == (["http://127.0.0.1:9090"], "")
    assert _controls("http://host:1/") == (["http://host:1"], "")


def test_the_address_of_the_frontend_is_not_that_of_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPD_URL", "http://frontend:8000")
    assert parse_settings(ListSettings, [], "ampd session list").coordinator_url is None
    monkeypatch.setenv("AMPD_COORDINATOR_URL", "http://coordinator:9090")
    assert parse_settings(ListSettings, [], "ampd session list").coordinator_url == "http://coordinator:9090"


def test_another_coordinator_is_asked_when_the_first_does_not_run(coordinator: str) -> None:
    assert _asked([DEAD, coordinator], "end", {"session_id": "s"}) == UNKNOWN
    with pytest.raises(UserError, match="does not answer"):
        _asked([DEAD, DEAD], "end", {"session_id": "s"})


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_the_end_of_an_unknown_session_fails(
    coordinator: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["session", "end", "s", "--coordinator-url", coordinator, *flags]) == 1
    captured = capsys.readouterr()
    assert "no session s is alive" in captured.err
    assert (json.loads(captured.out) if flags else captured.out) == (UNKNOWN if flags else "")
