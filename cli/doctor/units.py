"""Sizes as people read them."""

_GIB = 1 << 30
_MIB = 1 << 20


def gib(size_bytes: float) -> str:
    """In GiB, small ones in MiB."""
    if size_bytes < _GIB:
        return f"{size_bytes / _MIB:.0f} MiB"
    return f"{size_bytes / _GIB:.1f} GiB"
