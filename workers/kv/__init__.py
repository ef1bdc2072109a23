"""KV exchange between workers: the directory of pinned pages, and its transports."""
