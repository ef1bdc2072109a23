"""How a process shows what it does: metrics, logs, traces."""
