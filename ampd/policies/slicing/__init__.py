"""How a prefill shares its worker with the decode batch."""
