"""Loads that are tried again."""

import logging
from typing import Any

from serving.model import Model
from serving.repository.candidate import Candidate
from serving.repository.loader import VersionLoader
from sluice.errors import SluiceError

_log = logging.getLogger(__name__)


class RetryingLoader(VersionLoader):
    """Tries each version up to `num_retries` times more, at once, as Triton's --model-load-retry-count."""

    def __init__(self, *args: Any, num_retries: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_retries = num_retries

    async def load(self, candidate: Candidate, version: int) -> Model:
        for attempt in range(1, self._num_retries + 1):
            try:
                return await super().load(candidate, version)
            except SluiceError as error:
                _log.warning(
                    "model '%s' version %d cannot be loaded, attempt %d of %d: %s",
                    candidate.name, version, attempt, self._num_retries + 1, error.message,
                )  # fmt: skip
        return await super().load(candidate, version)
