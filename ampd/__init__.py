"""The shared core: types, configuration, performance model, policies, shared state and the `ampd` command."""

import os

if os.environ.get("AMPD_COMPILED") == "1":
    from ampd import compiled

    compiled.install()
