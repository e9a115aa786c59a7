"""What the metrics page shows: `--metrics-config` and `--allow-*-metrics`, as tritonserver has them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sluice.errors import SluiceError, invalid

FLAG = "--metrics-config"
_MIN_INTERVAL_MS = 1


class Quantile(NamedTuple):
    """`error` is how far off the rank may be. Ours is exact, so it asks for no more than there is anyway."""

    quantile: float
    error: float

    @property
    def label(self) -> str:
        return f"{self.quantile:g}"


DEFAULT_QUANTILES = (
    Quantile(0.5, 0.05),
    Quantile(0.9, 0.01),
    Quantile(0.95, 0.001),
    Quantile(0.99, 0.001),
    Quantile(0.999, 0.001),
)
"""Triton's."""


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Which families there are. `interval_s` is how old what is said of the machine and its GPUs may be."""

    is_allowed: bool = True
    allows_cpu: bool = True
    allows_gpu: bool = True
    interval_s: float = 2.0
    has_counters: bool = True
    has_summaries: bool = False
    has_histograms: bool = False
    has_triton_infer_aliases: bool = False
    quantiles: tuple[Quantile, ...] = DEFAULT_QUANTILES


def metrics_settings(
    texts: Iterable[str],
    *,
    is_allowed: bool = True,
    allows_cpu: bool = True,
    allows_gpu: bool = True,
    interval_ms: float = 2000,
) -> MetricsSettings:
    """What each `--metrics-config` says together, the last one of a key winning. Raises SluiceError INVALID."""
    if interval_ms < _MIN_INTERVAL_MS:
        raise invalid("--metrics-interval-ms", f"--metrics-interval-ms must be at least 1, got {interval_ms:g}")
    fields = dict(_setting(text) for text in texts)
    return MetricsSettings(
        is_allowed=is_allowed,
        allows_cpu=is_allowed and allows_cpu,
        allows_gpu=is_allowed and allows_gpu,
        interval_s=interval_ms / 1000,
        **fields,
    )


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not value:
        raise invalid(FLAG, f"{FLAG} must be KEY=VALUE, such as summary_latencies=true, got {text!r}")
    if key not in _SETTINGS:
        raise invalid(FLAG, f"{FLAG} has no setting {key!r}; it has {', '.join(_SETTINGS)}")
    name, read = _SETTINGS[key]
    return name, read(key, value)


def _truth(key: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise invalid(FLAG, f"{FLAG} {key} must be true or false, got {text!r}")
    return text == "true"


def _quantiles(key: str, text: str) -> tuple[Quantile, ...]:
    return tuple(_quantile(part) for part in text.strip("\"'").split(","))


def _quantile(text: str) -> Quantile:
    quantile, colon, error = text.partition(":")
    try:
        found = Quantile(float(quantile), float(error))
    except ValueError:
        raise _wrong_quantile(text) from None
    if not colon or not 0 <= found.quantile <= 1 or not 0 <= found.error <= 1:
        raise _wrong_quantile(text)
    return found


def _wrong_quantile(text: str) -> SluiceError:
    allowed = "QUANTILE:ERROR,..., both from 0 to 1, such as 0.5:0.05,0.99:0.001"
    return invalid(FLAG, f"{FLAG} summary_quantiles must be {allowed}, got {text!r}")


_SETTINGS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "counter_latencies": ("has_counters", _truth),
    "summary_latencies": ("has_summaries", _truth),
    "summary_quantiles": ("quantiles", _quantiles),
    "histogram_latencies": ("has_histograms", _truth),
    "triton_infer_aliases": ("has_triton_infer_aliases", _truth),
}
"""Triton's, and `triton_infer_aliases`."""
