"""The response cache: responses kept for equal requests (`response_cache` in config.pbtxt, `--cache-config`)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.serving.caching.response_cache import ResponseCache
    from sluice.serving.caching.settings import CacheSettings


def open_cache(settings: "CacheSettings") -> "ResponseCache":
    """Open the server's cache, on its event loop. Never fails. Redis's client takes 0.2 s to import."""
    from sluice.serving.caching.settings import LocalCacheSettings

    if isinstance(settings, LocalCacheSettings):
        from sluice.serving.caching.response_cache import LocalCache

        return LocalCache(settings.size_bytes)
    from sluice.serving.caching.redis_cache import RedisCache

    return RedisCache(settings)
