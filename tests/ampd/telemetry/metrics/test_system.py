"""The system port's environment."""

import logging
from typing import Any

import pytest

from ampd.errors import UserError
from ampd.telemetry.metrics import exposition


@pytest.mark.parametrize("port", ["-1", "0", "9090", "32767"])
def test_ports_that_dynamo_takes(port: str) -> None:
    environment = {"DYN_SYSTEM_PORT": port}
    exposition.prepare("python -m x", environment)
    assert environment == {"DYN_SYSTEM_PORT": port}


@pytest.mark.parametrize("port", ["32768", "-2", "http", "", "9090.0"])
def test_others_are_refused_in_one_line(port: str) -> None:
    with pytest.raises(UserError, match=r"^python -m x: DYN_SYSTEM_PORT=.*32767") as refusal:
        exposition.prepare("python -m x", {"DYN_SYSTEM_PORT": port})
    assert "\n" not in str(refusal.value)


def test_the_health_does_not_follow_an_endpoint() -> None:
    """A coordinator serves its endpoint only with a decode worker, and is well without one."""
    environment = {"DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]'}
    exposition.prepare("python -m x", environment)
    assert environment == {}


class Runtime:
    """The part of Dynamo's runtime that is asked."""

    def __init__(self, url: str | None) -> None:
        self._url = url

    def system_status_server_url(self) -> Any:
        return self._url


@pytest.mark.parametrize(
    ("port", "url", "said"),
    [
        ("0", "http://10.0.0.1:4711", "metrics at http://10.0.0.1:4711/metrics"),
        ("9090", None, "port 9090 is taken; set DYN_SYSTEM_PORT to a free one"),
        ("-1", None, ""),
    ],
)
def test_where_the_metrics_are(
    port: str, url: str | None, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DYN_SYSTEM_PORT", port)
    with caplog.at_level(logging.INFO):
        exposition.log_address(Runtime(url))
    assert said in caplog.text
    assert len(caplog.records) == bool(said)
