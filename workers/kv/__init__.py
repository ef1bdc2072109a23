"""KV exchange between workers: page keys, the directory of pinned pages, and its transports."""
