"""The KV store of a worker, the copies between it and the engine, and reads between stores."""
