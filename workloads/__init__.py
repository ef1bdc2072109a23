"""Agent workloads: the trace format, loaders, generators, live replay and reports."""
