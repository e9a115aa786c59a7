"""The GPUs of the machine."""

import re
from pathlib import Path

_DEVICES = Path("/dev")
_GPU = re.compile(r"nvidia\d+")


def num_gpus() -> int:
    """How many NVIDIA GPUs the driver shows; which libraries can use them is theirs to say."""
    return sum(1 for each in _DEVICES.glob("nvidia[0-9]*") if _GPU.fullmatch(each.name))
