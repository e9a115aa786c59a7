"""Counts NVIDIA GPUs without loading a library."""

import re
from pathlib import Path

_GPU = re.compile(r"nvidia\d+")
_DEVICES = Path("/dev")


def num_gpus(devices: Path = _DEVICES) -> int:
    """Return how many NVIDIA GPUs the driver shows as device files. A library may be able to use fewer of them."""
    return sum(1 for each in devices.glob("nvidia[0-9]*") if _GPU.fullmatch(each.name))
