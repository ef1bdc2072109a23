"""Engine adapters behind one protocol: SGLang (real) and modelled (sleeps by the performance model)."""
