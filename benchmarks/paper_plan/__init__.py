"""Layouts by the integer programme of the paper (arXiv 2602.14516, section 5), as `benchmarks.policies` plans them."""
