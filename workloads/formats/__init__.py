"""Loaders: from the trace formats of the field to ours, behind one registry."""

from workloads.formats.registry import LoadOptions, formats, load_sessions

__all__ = ["LoadOptions", "formats", "load_sessions"]
