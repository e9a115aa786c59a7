"""The little of torch that requests to TensorRT-LLM need, where torch is not installed."""

from collections.abc import Sequence
from typing import Any

import numpy as np

float32 = np.float32
Tensor = np.ndarray


def tensor(values: Sequence[float], dtype: Any = float32) -> Any:
    """A NumPy array: the stand-in takes either."""
    return np.array(values, dtype)
