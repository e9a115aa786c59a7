"""Where responses are kept that equal requests get again."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from serving.job import InferJob
from serving.statistics import CacheUsage, ModelStatistics

if TYPE_CHECKING:
    from serving.caching.answers import CachedAnswers
    from serving.spec import ModelSource

Run = Callable[[InferJob], None]
"""Has the model run a job. Raises SluiceError where it is refused."""


class CacheStore(ABC):
    """Responses by key, shared by the models of a server. Event loop's thread only."""

    usage: CacheUsage

    @abstractmethod
    def answers(self, source: "ModelSource", statistics: ModelStatistics, run: Run) -> "CachedAnswers":
        """What stands before one model version. A version that is loaded again finds nothing of other files."""

    @abstractmethod
    async def close(self) -> None:
        """Free its connections; from now on it knows nothing. To be called by who opened it, last. Idempotent."""
