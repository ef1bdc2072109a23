"""The ranks' side of the KV store, in SGLang's schedulers: copies between device and store, nothing else."""
