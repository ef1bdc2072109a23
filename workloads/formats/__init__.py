"""Loaders: from the trace formats of the field to ours, behind one registry."""

from workloads.formats.loader import LoadOptions, formats, load_sessions

__all__ = ["LoadOptions", "formats", "load_sessions"]
