"""What the processor's 8-bit arithmetic is worth."""

from functools import cache
from pathlib import Path

_VNNI = {"avx512_vnni", "avx_vnni"}


@cache
def overflows_int8() -> bool:
    """Whether products of signed 8-bit weights may overflow: x86 without VNNI adds them up in 16 bits.

    There `session.x64quantprecision` takes a way that is exact, and about half as fast.
    """
    try:
        return lacks_vnni(Path("/proc/cpuinfo").read_text())
    except OSError:  # unknown: exact rather than fast
        return True


def lacks_vnni(cpuinfo: str) -> bool:
    """By the flags of the first processor in /proc/cpuinfo's text; other architectures have none, and no such fault."""
    flags = next((line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith("flags")), None)
    return flags is not None and not _VNNI.intersection(flags)
