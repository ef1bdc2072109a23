"""Registers `ToldSlices` as `told`, in the processes of an engine: the environment names this module for them."""

from ampd.policies.registry import register
from tests.harness.told_slices import ToldSlices

register("slicing", "told")(ToldSlices)
