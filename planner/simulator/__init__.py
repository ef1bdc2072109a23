"""Discrete-event simulation of a cluster that serves agent sessions, in virtual time."""
