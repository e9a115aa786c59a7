"""Paths of the stand-in for TensorRT-LLM, and of one for torch where that is not installed."""

import os
from importlib.util import find_spec
from pathlib import Path

STAND_INS = Path(__file__).parent
PATHS = [STAND_INS] if find_spec("torch") else [STAND_INS, STAND_INS / "without_torch"]
PYTHONPATH = os.pathsep.join(map(str, PATHS))
