"""Wrong calls of `python -m router.status_relay`: one line, exit code 2, nothing started."""

import pytest

from router.status_relay.__main__ import main


@pytest.mark.parametrize("is_flag", [True, False])
def test_tls_of_the_frontend_behind_the_relay_is_refused(
    is_flag: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_flag:
        monkeypatch.setenv("DYN_TLS_CERT_PATH", "cert.pem")
    assert main(["--tls-cert-path", "cert.pem"] if is_flag else []) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "the relay has no TLS" in line


def test_an_alias_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model-alias", "claude-*"])
    assert "is not PATTERN=NAME" in capsys.readouterr().err
