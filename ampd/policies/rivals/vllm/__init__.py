"""vLLM: the order of its prefill-only optimisations."""
