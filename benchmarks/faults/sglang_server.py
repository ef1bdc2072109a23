"""Imported by the server that forks the processes of a graph: SGLang for its workers, and a server for their engines.

A worker must not fork its engine itself, because the engine's processes would keep the connections of a worker that
was killed open. The engines' server imports SGLang a second time.
"""

from __future__ import annotations

import os

from tests.harness.forked_engines import SERVER_ENVIRONMENT, start_server

os.environ.update(SERVER_ENVIRONMENT)
start_server(["sglang.srt.models.registry"])

import sglang.srt.entrypoints.engine  # noqa: E402, F401

import workers.engines.sglang  # noqa: E402
import workers.kv.exchange  # noqa: E402, F401
