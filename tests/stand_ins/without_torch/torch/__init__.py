"""The little of torch that requests to TensorRT-LLM need, where torch is not installed."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

float32 = np.float32
int32 = np.int32
cuda = SimpleNamespace(is_available=lambda: False)


class Tensor(np.ndarray):
    """An array with the names that torch has for what it is."""

    def float(self) -> Any:
        return self.astype(np.float32)

    def cpu(self) -> Any:
        return self

    def numpy(self) -> Any:
        return np.asarray(self)


def tensor(values: Sequence[float], dtype: Any = float32, device: str = "cpu") -> Any:
    """A NumPy array: the stand-in takes either."""
    return np.array(values, dtype).view(Tensor)
