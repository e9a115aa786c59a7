"""The names on the metrics page that are the server's own, whether or not they are shown now."""

from gateway.telemetry import aliases, cache, gpu, host, inference, latencies

_NAMES = frozenset(
    {*aliases.NAMES, *cache.NAMES, *gpu.NAMES, *host.NAMES, *inference.NAMES, *latencies.NAMES, *latencies.SAMPLE_NAMES}
)
_PREFIXES = ("sluice_", "process_")


def is_reserved(name: str) -> bool:
    """Whether a model may not call a family so."""
    return name in _NAMES or name.startswith(_PREFIXES)
