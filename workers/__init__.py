"""Prefill and decode workers: a Dynamo component whose role is set by a flag."""
