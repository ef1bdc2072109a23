"""The interpreters that run the code of rows: Python with the packages of the clients, or Node with those of npm.

Each reads the rows from its standard input, as JSON: name, session, code. It prints a line per row: name, error.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence

from benchmarks.clients.environment import clients_node_modules, clients_python
from benchmarks.clients.feature import NODE, Client, Feature, session_of

_TIMEOUT_S = 600.0
_MARK = "RESULT "
_MISSING = ("ModuleNotFoundError", "ERR_MODULE_NOT_FOUND")

PYTHON_RUN = """
import json, linecache, sys, warnings
warnings.simplefilter("ignore")
for name, session, code in json.load(sys.stdin):
    scope = {"URL": sys.argv[1], "SESSION": session}
    try:
        # smolagents reads the source of a tool.
        linecache.cache[session] = (len(code), None, code.splitlines(True), session)
        exec(compile(code, session, "exec"), scope)
        error = ""
    except BaseException as failure:
        error = f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:200]
    print("RESULT " + json.dumps([name, error]), flush=True)
"""

NODE_RUN = """
import { readFileSync } from "node:fs";
const Code = (async () => {}).constructor;
globalThis.AI_SDK_LOG_WARNINGS = false;
for (const [name, session, code] of JSON.parse(readFileSync(0, "utf8"))) {
    let error = "";
    try {
        await new Code("URL", "SESSION", "load", code)(process.argv[1], session, (name) => import(name));
    } catch (failure) {
        error = `${failure.code ?? failure.name}: ${failure.message}`.split(/\\s+/).join(" ").slice(0, 200);
    }
    console.log("RESULT " + JSON.stringify([name, error]));
}
"""


def errors(client: Client, features: Sequence[Feature], url: str) -> list[str] | None:
    """What each row raised, "" if nothing; None: the client is not installed."""
    if client.language == NODE and not (shutil.which("node") and clients_node_modules().is_dir()):
        return None
    environment = {**os.environ, "OPENAI_API_KEY": "none", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    environment.pop("PYTHONPATH", None)
    argv, folder = _interpreter(client, url)
    tasks = [(each.name, session_of(client, each), f"{client.preamble}\n{each.code}") for each in features]
    done = subprocess.run(
        argv,
        input=json.dumps(tasks),
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if any(word in done.stdout for word in _MISSING):
        return None
    lines = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    found = [str(json.loads(line)[1]) for line in lines]
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return found + [f"the client's process ended: {last[:200]}"] * (len(features) - len(found))


def _interpreter(client: Client, url: str) -> tuple[list[str], str | None]:
    """The command line, and the folder to run it in: Node looks for packages there."""
    if client.language == NODE:
        return ["node", "--input-type=module", "-e", NODE_RUN, url], str(clients_node_modules().parent)
    return [clients_python(), "-c", PYTHON_RUN, url], None
