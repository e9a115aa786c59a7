"""Where responses are kept that equal requests get again."""

from abc import ABC, abstractmethod

from pipelines.inference.statistics import CacheUsage


class CacheStore(ABC):
    """Values by key, shared by the models of a server. Event loop's thread only."""

    usage: CacheUsage

    @abstractmethod
    async def close(self) -> None:
        """Free its connections. Idempotent."""
