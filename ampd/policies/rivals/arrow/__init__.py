"""Arrow (2025): stateless instances, elastic pools."""
