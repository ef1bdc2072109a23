"""Load-aware deflection (arXiv 2607.02043): its routing, and the slicing that executes its schedule."""
