"""The shared core: types, configuration, performance model, policies, shared state and the `ampd` command."""

from ampd import compiled

compiled.install()
