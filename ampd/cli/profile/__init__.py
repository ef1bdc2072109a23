"""`ampd profile`: measures an engine and writes a performance model."""
