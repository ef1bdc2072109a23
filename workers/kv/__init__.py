"""The KV store of a worker, the copies between it and the engine, and reads between stores.

What this worker and others ask of each other: `exchange`, which reads with `peer_reads` and its transport
(`nixl_transport`). What the store holds: `store`, without clock and I/O. The worker's end of the engine: `engine_store`
and `rank_links`; the other end, in each rank of the engine: `ranks`. `modelled` has the store and the transport of a
modelled engine. `geometry`, `rank_messages` and `store_memory` are shared by worker and ranks.
"""
