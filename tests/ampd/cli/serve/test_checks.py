"""What `ampd serve` refuses before anything starts: wrong policies, more processes than the machine has watches for."""

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

from ampd.cli.main import main
from ampd.cli.serve import settings as checks
from ampd.cli.serve.settings import ServeSettings, check_policies
from ampd.errors import UserError


def test_parameters_may_follow_the_name() -> None:
    check_policies(
        ServeSettings(routing="threshold(tokens=512, share=0.5)", ordering="ampd(window=5)", binding="least-kv")
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"routing": "psychic"}, "unknown routing policy 'psychic'; known: always-local"),
        ({"routing": "threshold(words=5)"}, "routing policy threshold has no parameter 'words'; known: tokens, share"),
        ({"ordering": "ampd(window=many)"}, "ordering policy ampd: window: "),
        ({"binding": "kv-router(overlap_weight=-1)"}, "binding policy kv-router: overlap_weight: "),
        ({"routing": "threshold(tokens)"}, "give parameters as name=value"),
    ],
)
def test_a_wrong_policy_is_one_line(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        check_policies(ServeSettings(**flags))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_of_sessions_need_the_relay_that_reads_them() -> None:
    checks.check_session_names(ServeSettings(session_names="x-my-run+x-my-agent,body:metadata.run"))
    with pytest.raises(UserError, match=r"^ampd serve: --session-names: 'a b' is no name"):
        checks.check_session_names(ServeSettings(session_names="a b"))
    with pytest.raises(UserError, match=r"^ampd serve: --session-names: the relay reads them"):
        checks.check_session_names(ServeSettings(session_names="x-my-run", status_relay=False))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_name": ["claude-*"]}, "'claude-\\*' is a pattern; give a name before it"),
        ({"model_name": ["a", "b-*"], "status_relay": False}, "needs the status relay"),
    ],
)
def test_a_pattern_of_names_that_nothing_would_read_is_refused(changes: dict[str, Any], words: str) -> None:
    checks.check_names(ServeSettings(model_name=["a", "b-*"]))
    with pytest.raises(UserError, match=words):
        checks.check_names(ServeSettings(**changes))


def test_a_worker_must_own_sessions() -> None:
    checks.check_workers(ServeSettings(mixed=1))
    checks.check_workers(ServeSettings(prefill=0))
    with pytest.raises(UserError, match=r"^ampd serve: --decode: at least one decode worker .*--mixed"):
        checks.check_workers(ServeSettings(decode=0))


def test_a_number_of_workers_and_their_roles_exclude_each_other() -> None:
    checks.check_workers(ServeSettings(workers=4, tp=2))
    for settings in (ServeSettings(workers=4, mixed=0), ServeSettings(workers=4, mixed_tp=2)):
        with pytest.raises(UserError, match=r"^ampd serve: --mixed(-tp)?: --workers starts workers of any role"):
            checks.check_workers(settings)


def test_the_performance_model_must_have_the_degrees_of_all_roles() -> None:
    checks.check_perf(ServeSettings(perf="qwen3-32b-h20", mixed=2, mixed_tp=4))
    checks.check_perf(ServeSettings(perf="qwen3-32b-h20", prefill=0, decode=2, decode_tp=4))
    with pytest.raises(UserError, match="tp 3"):
        checks.check_perf(ServeSettings(perf="qwen3-32b-h20", mixed=2, mixed_tp=3))


def test_a_file_of_secrets_must_be_readable(tmp_path: Path) -> None:
    checks.check_secret(ServeSettings())
    with pytest.raises(UserError, match=r"^ampd serve: --graph-secret-file: cannot read "):
        checks.check_secret(ServeSettings(graph_secret_file=tmp_path))
    file = tmp_path / "secret"
    file.write_text("s" * 64)
    checks.check_secret(ServeSettings(graph_secret_file=file))
    assert main(["serve", "--engine", "modelled", "--graph-secret-file", str(tmp_path)]) == 2


def test_more_processes_than_file_watches_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "max_user_instances"
    limit.write_text("128\n")
    monkeypatch.setattr(checks, "_WATCH_LIMIT", limit)
    monkeypatch.setattr(checks, "used_watches", lambda: 2)
    checks.check_watches(18)
    with pytest.raises(UserError, match=r"19 processes.* 133 .* 2 of the 128 .*sysctl") as refused:
        checks.check_watches(19)
    assert "\n" not in str(refused.value)
    monkeypatch.setattr(checks, "_WATCH_LIMIT", tmp_path / "not-linux")
    checks.check_watches(1000)


def test_file_watches_in_use_are_counted() -> None:
    before = checks.used_watches()
    libc = ctypes.CDLL(None)
    watches = [libc.inotify_init() for _ in range(3)]
    try:
        assert checks.used_watches() >= before + 1  # others may have ended some meanwhile
    finally:
        for watch in watches:
            os.close(watch)
