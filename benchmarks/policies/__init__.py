"""Which policies carry the highest session rate: `python -m benchmarks.policies` (see benchmarks/README.md)."""
