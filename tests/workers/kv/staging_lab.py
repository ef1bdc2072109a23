"""Reads a worker's staging memory."""

from workers.kv.nixl_exchange import NixlExchange


def staging_free_tokens(exchange: NixlExchange) -> int:
    """Room in staging memory that is free."""
    return exchange.staging._allocator.free_pages * exchange.layout.page_size
