"""Metrics: their names (`names`), counting them (`values`), and how Prometheus reads them (`exposition`)."""
