"""Which decode worker owns a new session."""
