"""Host memory and disk behind the KV cache: blocks that the cache gives up are kept there, and found again by hash."""
