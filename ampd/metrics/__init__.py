"""Metrics: what is measured and how it is called (`names`), counting it (`recorders`), and how Prometheus gets it."""
