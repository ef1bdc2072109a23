"""The `ampd` command. It imports a command's module only when that command runs, so that planning loads no engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version

from ampd import compiled
from ampd.errors import UserError, did_you_mean, guarded

COMMANDS = {
    "serve": ("ampd.cli.serve.command", "start the whole graph on this machine"),
    "replay": ("workloads.replay_command", "replay a trace of agent sessions against an OpenAI endpoint"),
    "profile": ("ampd.cli.profile", "measure an engine and fit its performance model"),
    "plan": ("planner.plan_command", "find the cluster layout that serves a workload best"),
    "simulate": ("planner.simulate_command", "simulate how a cluster would serve a trace"),
    "compare": ("ampd.cli.compare", "compare results, or make a report again, from --json of the above"),
    "top": ("ampd.cli.top", "watch a running graph: workers, queues, latencies, routes, sessions"),
    "trace": ("workloads.trace_command", "convert, generate or describe traces"),
    "doctor": ("ampd.cli.doctor", "report whether this machine can run a graph"),
    "session": ("ampd.cli.session", "list, show and end the sessions of a running graph"),
    "completion": ("ampd.cli.completion", "complete commands and flags in bash, zsh and fish"),
}
"""Command -> (module with `run(argv) -> exit code`, one line of help)."""

SETTINGS = (
    "ampd.settings:GraphSettings",
    "ampd.cli.serve.settings:ServeSettings",
    "router.settings:CoordinatorSettings",
    "workers.settings:WorkerSettings",
    "workers.engines.sglang_settings:SglangSettings",
    "workers.engines.modelled:ModelledSettings",
    "planner.case_settings:PlanSettings",
    "planner.simulate_command:SimulateSettings",
    "workloads.replay_command:ReplaySettings",
    "ampd.cli.compare:CompareSettings",
    "workloads.trace_command:ConvertSettings",
    "workloads.trace_command:GenerateSettings",
    "workloads.trace_command:StatsSettings",
    "ampd.cli.top:TopSettings",
    "ampd.cli.session:ListSettings",
    "ampd.cli.session:EndSettings",
    "ampd.cli.doctor:DoctorSettings",
    "ampd.cli.completion:CompletionSettings",
    "ampd.tiny_model:TinyModelSettings",
    "ampd.cli.profile:ProfileSettings",
)
"""The models of all settings. Those that most users set come first, because looking for a variable imports them."""

OTHER_VARIABLES = frozenset({"AMPD_POLICY_MODULES", "AMPD_SGLANG_ENGINE", "AMPD_REDIS_PASSWORD", "AMPD_REDIS_URL"})
"""Our variables that are no settings."""


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatch to a command.

    Returns:
        0 done, 1 it ran and failed, 2 the call or the input was wrong (one line on stderr), 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _dispatch(arguments))


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name in ("-V", "--version"):
        print(f"ampd {version('ampd')}, simulator: {compiled.state()}")
        return 0
    if name not in COMMANDS:
        raise UserError(f"ampd: unknown command {name!r}; known: {', '.join(COMMANDS)}{did_you_mean(name, COMMANDS)}")
    if unread := _unread_variables():
        print(f"ampd: nothing reads {', '.join(unread)}", file=sys.stderr)
    command: Callable[[Sequence[str]], int] = import_module(COMMANDS[name][0]).run
    return command(rest)


def _unread_variables() -> list[str]:
    """The variables `AMPD_*` that are no setting of any process, each with the one that it is most like."""
    from ampd.settings import PREFIX, variables_of

    unknown = {name for name in os.environ if name.startswith(PREFIX)} - OTHER_VARIABLES
    known = set(OTHER_VARIABLES)
    for module, _, name in (text.partition(":") for text in SETTINGS):
        if not unknown - known:
            return []
        known |= variables_of(getattr(import_module(module), name))
    hints = {name: did_you_mean(name, known).removeprefix("; ") for name in sorted(unknown - known)}
    return [f"{name} ({hint})" if hint else name for name, hint in hints.items()]


def _help() -> str:
    lines = ["usage: ampd COMMAND ...", ""]
    lines += [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([*lines, "", "ampd COMMAND --help explains one."])


if __name__ == "__main__":
    sys.exit(main())
