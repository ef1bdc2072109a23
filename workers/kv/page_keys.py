"""Keys of KV pages, as the exchange uses them; coordinators name pages too, so the function is in the core."""

from ampd.page_keys import KEY_BYTES, page_keys

__all__ = ["KEY_BYTES", "page_keys"]
