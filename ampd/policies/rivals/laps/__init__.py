"""LAPS (arXiv 2601.11589): length-aware prefill."""
