"""The numpy arrays that the engine passes around."""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
ByteArray = NDArray[np.uint8]
