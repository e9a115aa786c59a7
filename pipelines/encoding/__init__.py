"""Encoders, rerankers and classifiers: texts in, vectors and scores out."""

from collections.abc import Awaitable, Callable

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
"""[n, dim] float32, each row of length 1."""
Vector = npt.NDArray[np.float32]
"""[dim] float32, of length 1."""
AdmitTokens = Callable[[int], Awaitable[None]]
"""Asks whether so many tokens may be encoded. Raises SluiceError where not."""


async def admit_all(num_tokens: int) -> None:
    """Let any number of tokens be encoded."""
