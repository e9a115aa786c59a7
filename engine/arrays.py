"""The numpy arrays that the engine passes around."""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
Doubles = NDArray[np.float64]
ByteArray = NDArray[np.uint8]
Mask = NDArray[np.bool_]
Rows = NDArray[np.intp]
"""Indices of rows of logits."""
Ids = NDArray[np.intp]
"""Token ids."""
