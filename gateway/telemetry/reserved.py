"""The names on the metrics page that are the server's own, whether or not they are shown now."""

from gateway.telemetry import aliases, cache, gpu, host, inference, latencies, trt_llm

_SOURCES = (aliases, cache, gpu, host, inference, latencies, trt_llm)
_NAMES = frozenset(
    {*latencies.SAMPLE_NAMES, *trt_llm.SAMPLE_NAMES, *(name for source in _SOURCES for name in source.NAMES)}
)
_PREFIXES = ("sluice_", "process_")


def is_reserved(name: str) -> bool:
    """Whether a model may not call a family so."""
    return name in _NAMES or name.startswith(_PREFIXES)
