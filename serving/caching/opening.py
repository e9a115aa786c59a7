"""From settings to a cache, and from a cache to what stands before a model."""

from typing import TYPE_CHECKING

from serving.caching.answers import CachedAnswers, is_cached
from serving.caching.local import LocalCache
from serving.caching.settings import CacheSettings, LocalCacheSettings
from serving.caching.store import CacheStore, Run
from serving.statistics import ModelStatistics

if TYPE_CHECKING:
    from serving.spec import ModelSource


def open_cache(settings: CacheSettings) -> CacheStore:
    """The server's cache, on the event loop that will use it. Never fails: Redis is looked for as long as it takes."""
    if isinstance(settings, LocalCacheSettings):
        return LocalCache(settings.size_bytes)
    from serving.caching.redis_store import RedisCache  # most servers have no Redis, and the client takes 0.2 s

    return RedisCache(settings)


def answers_of(
    source: "ModelSource", statistics: ModelStatistics, store: CacheStore | None, run: Run
) -> CachedAnswers | None:
    """What stands before a model that asks for a cache, out of `store` or a memory of its own; else None."""
    if not is_cached(source.config):
        return None
    return (store or LocalCache()).answers(source, statistics, run)
