"""Which waiting prefill of a queue runs next."""
