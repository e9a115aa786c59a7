"""Texts to vectors, by any model of the repository."""

from collections.abc import Sequence

from pipelines.backends.base import ModelLookup
from pipelines.rag.types import Vector, Vectors


class TextEncoder:
    """A repository model that makes vectors of texts. Looks its model up for each call, so that a reload is seen."""

    def __init__(self, models: ModelLookup, name: str) -> None:
        self.name = name
        self._models = models

    async def dim(self) -> int:
        """The length of its vectors. Raises as `encode_documents`."""
        raise NotImplementedError

    async def encode_documents(self, texts: Sequence[str]) -> Vectors:
        """[len(texts), dim] float32, each of length 1, with the model's prefix for documents.

        Raises SluiceError UNAVAILABLE, which names the model, where it does not serve, INVALID where it is no encoder.
        """
        raise NotImplementedError

    async def encode_query(self, text: str) -> Vector:
        """[dim] float32 of length 1, with the model's prefix for queries."""
        raise NotImplementedError

    async def token_starts(self, text: str) -> list[int]:
        """Where each of the model's tokens begins in `text`, in characters: what chunks are measured by."""
        raise NotImplementedError
