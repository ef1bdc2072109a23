"""The body of `ampd session`: asks a coordinator's system port about sessions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from pydantic import Field
from pydantic_settings import CliPositionalArg

from ampd.call_signatures import operator_token, read_secrets
from ampd.cli.top_screen import printable
from ampd.errors import RunError, UserError
from ampd.settings import Settings, parse_settings, run_subcommand
from ampd.state.embedded import URL, graphs_at, only_one
from ampd.telemetry.metrics.exposition import PORT_VARIABLE
from ampd.wire import SESSIONS_ROUTE

PROG = "ampd session"
_TIMEOUT_S = 10.0
_HELP = """usage: ampd session COMMAND ...

  list        list the sessions whose KV a worker holds
  show ID     show one session
  end ID      end a session without a round

ampd session COMMAND --help explains one."""

Answer = dict[str, Any]
"""A body of JSON."""
_URL = (
    "System port of a coordinator, as in http://HOST:PORT; default: DYN_SYSTEM_PORT of this process, else "
    "those of the `ampd serve` on this machine."
)
_JSON = "Print the coordinator's answer as JSON."
_SECRET = "File with the secrets of the graph, as its coordinators have it; default: that of the `ampd serve` here."


class SessionSettings(Settings):
    """How a coordinator is found and asked."""

    url: str | None = Field(None, description=URL)
    coordinator_url: str | None = Field(None, description=_URL)
    graph_secret_file: Path | None = Field(None, description=_SECRET)
    as_json: bool = Field(False, validation_alias="json", description=_JSON)


class ListSettings(SessionSettings):
    """List the sessions whose KV a worker holds, the largest first."""

    limit: int = Field(50, ge=1, description="Sessions to list.")


class ShowSettings(SessionSettings):
    """Show one session: its decode worker, and where its KV is."""

    session_id: CliPositionalArg[str] = Field(
        description="The client's id of the session. If no client uses it: its name of 32 hexadecimal digits from "
        "`ampd session list`."
    )
    tenant: str = Field("", description="Tenant of the session (x-tenant-id), if it has one.")


class EndSettings(ShowSettings):
    """End a session: its binding and its KV are released everywhere, without a round."""

    tenant: str = Field(
        "",
        description="Tenant of the session (x-tenant-id), if it has one, also with a name of 32 digits.",
    )


def run(argv: Sequence[str]) -> int:
    """Run one of the sub-commands.

    Raises:
        UserError: an unknown sub-command, a wrong flag, or a coordinator that does not answer.
        RunError: the coordinator refused.
    """
    commands: dict[str, Callable[[Sequence[str]], None]] = {"list": _list, "show": _show, "end": _end}
    return run_subcommand(PROG, _HELP, commands, argv)


def _list(argv: Sequence[str]) -> None:
    settings = parse_settings(ListSettings, argv, f"{PROG} list")
    _show_answer(settings, "list", {"limit": settings.limit}, _listed)


def _listed(answer: Answer) -> Iterator[str]:
    yield f"{'session':32}  {'tokens':>8}  {'idle':>7}  {'worker':16}  id"
    for row in answer["sessions"]:
        tokens, held_by = max(row["held_tokens"].values(), default=0), ",".join(row["held_tokens"])
        idle = "-" if row["idle_s"] is None else f"{row['idle_s']:.0f} s"
        yield f"{row['session_key']:32}  {tokens:>8}  {idle:>7}  {held_by:16}  {_owner(row)}"
    if (hidden := answer["total"] - len(answer["sessions"])) > 0:
        yield f"... {hidden} more (--limit)"


def _show(argv: Sequence[str]) -> None:
    settings = parse_settings(ShowSettings, argv, f"{PROG} show")
    _show_answer(settings, "show", _names(settings), _shown)


def _shown(answer: Answer) -> Iterator[str]:
    yield f"session {answer['session_key']}: {_owner(answer)}"
    bound = answer["binding"]
    yield (f"bound to {bound['worker_id']}, epoch {bound['epoch']}" if bound else "not bound to a decode worker")
    for worker_id, tokens in answer["held_tokens"].items():
        yield f"{tokens} tokens of KV on {worker_id}"
    if answer["idle_s"] is not None:
        yield f"last round ended {answer['idle_s']:.0f} s ago"


def _end(argv: Sequence[str]) -> None:
    settings = parse_settings(EndSettings, argv, f"{PROG} end")
    _show_answer(settings, "end", _names(settings), partial(_ended, settings.session_id))


def _ended(session_id: str, answer: Answer) -> Iterator[str]:
    if not (answer["was_bound"] or answer["released_tokens"]):
        raise RunError(
            f"{PROG} end: no session {printable(session_id)} is alive; if it has a tenant, name the tenant: --tenant"
        )
    yield f"session {answer['session_key']} has ended; workers held {answer['released_tokens']} tokens of its KV"


def _owner(row: Answer) -> str:
    """The client's id, and the tenant if there is one; both only if the coordinator served its last round."""
    if row["session_id"] is None:
        return "-"
    tenant = f" (tenant {row['tenant']})" if row["tenant"] else ""
    return f"{row['session_id']}{tenant}"


def _names(settings: ShowSettings) -> dict[str, str]:
    # A coordinator also takes a name of 32 digits from the list. Only it can tell one from a client's id that looks so.
    return {"session_id": settings.session_id, "tenant": settings.tenant}


def _show_answer(
    settings: ListSettings | ShowSettings,
    operation: str,
    body: dict[str, Any],
    lines: Callable[[Answer], Iterator[str]],
) -> None:
    """Print the answer of a coordinator as lines, or with `--json` as it came. Anything may listen at a user's URL."""
    urls, token = _controls(settings.coordinator_url, settings.url)
    if keys := read_secrets(settings.graph_secret_file, PROG):
        token = operator_token(keys[0])
    answer = _asked(urls, operation, {**body, "token": token})
    if settings.as_json:
        print(json.dumps(answer, indent=1))
    try:
        text = "\n".join(map(printable, lines(answer)))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"{PROG}: {urls[0]} does not answer as a coordinator ({error!r}); see --coordinator-url"
        ) from None
    if not settings.as_json:
        print(text)


def _asked(control_urls: Sequence[str], operation: str, body: dict[str, Any]) -> Answer:
    """The answer of the first coordinator that can be reached."""
    control_url, *others = control_urls
    url = f"{control_url}/engine/{SESSIONS_ROUTE}/{operation}"
    try:
        reply = httpx.post(url, json=body, timeout=_TIMEOUT_S, trust_env=False)
        answer: Answer = reply.json() if reply.is_success else {}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError) as error:
        if others and isinstance(error, httpx.ConnectError):
            return _asked(others, operation, body)
        raise UserError(f"{PROG}: {url} does not answer as a coordinator ({error}); see --coordinator-url") from None
    if not reply.is_success:
        raise UserError(
            f"{PROG}: {url} answers {reply.status_code}; is it a coordinator's system port, and is --graph-secret-file "
            "that of its graph?"
        )
    if not isinstance(answer, dict):
        raise UserError(f"{PROG}: {url} does not answer as a coordinator; see --coordinator-url")
    if "error" in answer:
        raise RunError(f"{PROG} {operation}: {printable(str(answer['error']))}")
    return answer


def _controls(given: str | None, url: str | None = None) -> tuple[Sequence[str], str]:
    """The system ports of the coordinators of one graph, each of which can be asked, and its token if it is known."""
    if given:
        return [given.rstrip("/")], ""
    if url is None and (port := os.environ.get(PORT_VARIABLE, "")).isdigit() and int(port):
        return [f"http://127.0.0.1:{port}"], ""
    graph = only_one([graph for graph in graphs_at(url) if graph.controls], PROG)
    if graph is None:
        raise UserError(
            f"{PROG}: no `ampd serve` with system ports runs on this machine (with --no-metrics there are none); "
            "name a coordinator with --coordinator-url"
        )
    return graph.controls, graph.token
