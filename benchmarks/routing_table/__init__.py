"""Routing tables, fitted by simulation."""
