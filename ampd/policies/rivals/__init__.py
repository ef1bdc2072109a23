"""Policies of other systems, for comparison: one module or folder per system."""
