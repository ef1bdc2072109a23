"""The KV store of a worker: shared host memory, and the directory of what lies where in it."""
