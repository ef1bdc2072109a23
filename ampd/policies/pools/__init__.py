"""Which role each worker has."""
