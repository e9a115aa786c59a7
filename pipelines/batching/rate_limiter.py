"""What instances may take together while they run (`--rate-limit`)."""

from collections.abc import Mapping


class RateLimiter:
    """One for a server. Event loop's thread only."""

    def __init__(self, resources: Mapping[tuple[str, int | None], int] | None = None) -> None:
        """`resources`: how much there is, by name and device (None: on each, or in all for global ones)."""
        self._resources = dict(resources or {})
