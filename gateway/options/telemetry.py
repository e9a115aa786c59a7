"""Options of logging, metrics and tracing, under tritonserver's names."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from sluice.errors import SluiceError, invalid
from sluice.gateway.options.goodput import GoodputTargets, parse_targets
from sluice.gateway.options.option import OptionError, choice, integer, option, printable_text, seconds, truth
from sluice.log_lines import JSON

_BOOL = "BOOL"
METRICS_FLAG = "--metrics-config"
TRACE_CONFIG = "--trace-config"
_LEADING_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_MIN_INTERVAL_MS = 1
ALIAS_FAMILIES = ("vllm", "trtllm", "dynamo")
"""Servers under whose names metrics can be shown too."""


class Quantile(NamedTuple):
    """A quantile, and the error of its rank that is tolerated. Ours are exact, so any error will do."""

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
"""Triton's default quantiles."""


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Selects the families of the metrics page. `interval_s` is the longest age of values of the machine and its
    GPUs."""

    is_allowed: bool = True
    allows_cpu: bool = True
    allows_gpu: bool = True
    interval_s: float = 2.0
    has_counters: bool = True
    has_summaries: bool = False
    has_histograms: bool = False
    has_triton_infer_aliases: bool = False
    quantiles: tuple[Quantile, ...] = DEFAULT_QUANTILES


def _verbose_level(text: str) -> int:
    """Parse a level of verbose logging, or whether there is any."""
    truths = {"true": 1, "false": 0}
    return truths[text.lower()] if text.lower() in truths else integer(0, 2**31 - 1)(text)


@dataclass(frozen=True, slots=True)
class LoggingOptions:
    """Logging: to standard error. Clients may change it at /v2/logging"""

    level: str = option(
        "--log-level",
        "info",
        choice("debug", "info", "warning", "error"),
        "LEVEL",
        "debug, info, warning or error",
    )
    verbose: int = option(
        "--log-verbose", 0, _verbose_level, "LEVEL", "tritonserver's form of --log-level debug: any level above 0"
    )
    has_info: bool | None = option("--log-info", None, truth, _BOOL, "log lines of that level")
    has_warning: bool | None = option("--log-warning", None, truth, _BOOL, "log lines of that level")
    has_error: bool | None = option("--log-error", None, truth, _BOOL, "log lines of that level")
    time_format: str = option(
        "--log-format",
        "default",
        choice("default", "ISO8601", JSON),
        "FORMAT",
        "format of lines: default, ISO8601 (its times) or json (an object a line)",
    )
    file: str = option(
        "--log-file",
        "",
        printable_text("the path of a file"),
        "PATH",
        "append the log to a file instead of standard error",
    )

    @property
    def lowest_level(self) -> str:
        """The lowest level that is logged."""
        return "debug" if self.verbose else self.level

    def settings(self) -> dict[str, bool | int | str]:
        """Return the settings beside the level, as the logging extension of the v2 protocol spells them."""
        levels = {"log_info": self.has_info, "log_warning": self.has_warning, "log_error": self.has_error}
        settings: dict[str, bool | int | str] = {name: value for name, value in levels.items() if value is not None}
        if self.verbose:
            settings["log_verbose_level"] = self.verbose
        if self.time_format not in ("default", JSON):
            settings["log_format"] = self.time_format
        return settings


def _alias_families(text: str) -> tuple[str, ...]:
    """Parse names of other servers whose names of metrics are shown."""
    names = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    if not set(names) <= set(ALIAS_FAMILIES):
        raise ValueError(f"some of {', '.join(ALIAS_FAMILIES)}, with commas between")
    return names


def _http_url(text: str) -> str:
    """Parse the URL of a collector."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("a URL such as http://localhost:4317")
    return text


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Metrics: Prometheus"""

    port: int = option("--metrics-port", 8002, integer(0, 65535), "PORT", "port of GET /metrics; 0 takes a free one")
    host: str | None = option(
        "--metrics-address",
        None,
        printable_text("a host name or address"),
        "ADDRESS",
        "address to listen on for metrics. Default: that of --host",
    )
    is_allowed: bool = option("--allow-metrics", True, truth, _BOOL, "serve metrics at all")
    allows_cpu: bool = option("--allow-cpu-metrics", True, truth, _BOOL, "show the machine's processors and memory")
    allows_gpu: bool = option("--allow-gpu-metrics", True, truth, _BOOL, "show the machine's GPUs")
    interval_ms: int = option(
        "--metrics-interval-ms",
        2000,
        integer(1),
        "MILLISECONDS",
        "longest age of values of the machine and its GPUs",
    )
    settings: tuple[str, ...] = option(
        "--metrics-config",
        (),
        printable_text("KEY=VALUE, such as summary_latencies=true"),
        "KEY=VALUE",
        "counter_latencies, summary_latencies, histogram_latencies: true or false; summary_quantiles=0.5:0.05,...; "
        "triton_infer_aliases=true adds the triton_infer_* names of older dashboards. May be given several times",
        is_many=True,
        separator=";",
    )
    aliases: tuple[str, ...] = option(
        "--metrics-aliases",
        (),
        _alias_families,
        "NAMES",
        "show the metrics under the names of other servers too, for boards and autoscalers made for them: vllm, "
        "trtllm, dynamo, with commas between",
    )
    targets: GoodputTargets | None = option(
        "--slo",
        None,
        parse_targets,
        "ttft=MS,itl=MS,...",
        "targets of goodput in milliseconds: ttft, itl (99th percentile of a request's gaps), tpot, e2e. Requests that "
        "meet all are counted, and those that do not",
    )
    otlp_endpoint: str | None = option(
        "--otlp-metrics-endpoint",
        None,
        _http_url,
        "URL",
        "push metrics to an OpenTelemetry collector, such as http://localhost:4317: the GenAI conventions' and all "
        "sluice_*. Needs sluice[otel]",
    )
    otlp_protocol: str = option(
        "--otlp-metrics-protocol",
        "grpc",
        choice("grpc", "http"),
        "PROTOCOL",
        "protocol of the push: grpc, or http (protobuf, to URL/v1/metrics where the URL has no path)",
    )
    otlp_interval_s: float = option(
        "--otlp-metrics-interval-secs", 60.0, seconds(0.1), "SECONDS", "seconds between two pushes"
    )

    def __post_init__(self) -> None:
        """Check options against each other. Raises OptionError."""
        self.parsed()

    def parsed(self) -> MetricsSettings:
        """Return the settings of the page. Raises OptionError."""
        try:
            return parse_metrics_settings(
                self.settings,
                is_allowed=self.is_allowed,
                allows_cpu=self.allows_cpu,
                allows_gpu=self.allows_gpu,
                interval_ms=self.interval_ms,
            )
        except SluiceError as error:
            raise OptionError(error.message) from None


def parse_metrics_settings(
    texts: Iterable[str],
    *,
    is_allowed: bool = True,
    allows_cpu: bool = True,
    allows_gpu: bool = True,
    interval_ms: float = 2000,
) -> MetricsSettings:
    """Combine the texts of `--metrics-config`; the last one of a key wins. Raises SluiceError INVALID."""
    if interval_ms < _MIN_INTERVAL_MS:
        raise invalid("--metrics-interval-ms", f"--metrics-interval-ms must be at least 1, got {interval_ms:g}")
    fields = dict(_parse_metrics_setting(text) for text in texts)
    return MetricsSettings(
        is_allowed=is_allowed,
        allows_cpu=is_allowed and allows_cpu,
        allows_gpu=is_allowed and allows_gpu,
        interval_s=interval_ms / 1000,
        **fields,
    )


def _parse_metrics_setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not value:
        raise invalid(METRICS_FLAG, f"{METRICS_FLAG} must be KEY=VALUE, such as summary_latencies=true, got {text!r}")
    if key not in _METRICS_SETTINGS:
        raise invalid(METRICS_FLAG, f"{METRICS_FLAG} has no setting {key!r}; it has {', '.join(_METRICS_SETTINGS)}")
    name, read = _METRICS_SETTINGS[key]
    return name, read(key, value)


def _parse_truth(key: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise invalid(METRICS_FLAG, f"{METRICS_FLAG} {key} must be true or false, got {text!r}")
    return text == "true"


def _parse_quantiles(key: str, text: str) -> tuple[Quantile, ...]:
    return tuple(_parse_quantile(part) for part in text.strip("\"'").split(","))


def _parse_quantile(text: str) -> Quantile:
    # Like C's `stod`, each number ends where the text stops being one: Triton's own example has 0.1:0.0.1.
    quantile, error = (_LEADING_NUMBER.match(part) for part in text.partition(":")[::2])
    if quantile is None or error is None:
        raise _wrong_quantile(text)
    found = Quantile(float(quantile[0]), float(error[0]))
    if not 0 <= found.quantile <= 1 or not 0 <= found.error <= 1:
        raise _wrong_quantile(text)
    return found


def _wrong_quantile(text: str) -> SluiceError:
    allowed = "QUANTILE:ERROR,..., both from 0 to 1, such as 0.5:0.05,0.99:0.001"
    return invalid(METRICS_FLAG, f"{METRICS_FLAG} summary_quantiles must be {allowed}, got {text!r}")


_METRICS_SETTINGS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "counter_latencies": ("has_counters", _parse_truth),
    "summary_latencies": ("has_summaries", _parse_truth),
    "summary_quantiles": ("quantiles", _parse_quantiles),
    "histogram_latencies": ("has_histograms", _parse_truth),
    "triton_infer_aliases": ("has_triton_infer_aliases", _parse_truth),
}
"""Triton's settings and `triton_infer_aliases`: field of MetricsSettings, and parser, by key."""
_RATE, _COUNT, _FREQUENCY = "rate", "count", "log-frequency"
_TRACE_LEVELS = {
    "timestamps": "TIMESTAMPS",
    "tensors": "TENSORS",
    **dict.fromkeys(("off", "false"), "OFF"),
    **dict.fromkeys(("on", "true", "min", "max"), "TIMESTAMPS"),
}
"""Values of `level`, in any case."""
_OPENTELEMETRY = "opentelemetry"
_OTEL_NUMBERS = ("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size")
_TRACE_SETTINGS = (
    "triton,file=PATH, level=TIMESTAMPS, level=TENSORS, rate=N (one request of N is traced), count=N (-1: no limit), "
    "triton,log-frequency=N, mode=opentelemetry, opentelemetry,url=URL, opentelemetry,resource=KEY=VALUE or "
    "opentelemetry,bsp_max_queue_size=N (bsp_schedule_delay, bsp_max_export_batch_size)"
)


def _parse_trace_setting(text: str) -> tuple[str, str]:
    """Parse KEY=VALUE, where `triton,` or `opentelemetry,` may precede settings of that mode."""
    mode, comma, rest = text.partition(",")
    of_otel = bool(comma) and mode == _OPENTELEMETRY
    key, equals, value = (rest if of_otel else text.removeprefix("triton,")).partition("=")
    is_known = _check_otel_setting(key, value) if of_otel else _check_trace_setting(key, value)
    if not equals or not is_known:
        raise ValueError(_TRACE_SETTINGS)
    return key, _TRACE_LEVELS[value.lower()] if key == "level" else value


def _check_trace_setting(key: str, value: str) -> bool:
    is_number = value.isdecimal() or (key == _COUNT and value == "-1")
    is_known = {
        "file": bool(value),
        "level": value.lower() in _TRACE_LEVELS,
        _RATE: is_number,
        _COUNT: is_number,
        _FREQUENCY: is_number,
        "mode": value.lower() in ("triton", _OPENTELEMETRY),
    }
    return is_known.get(key, False)


def _check_otel_setting(key: str, value: str) -> bool:
    name, equals, _ = value.partition("=")
    return {
        "url": value.startswith(("http://", "https://")),
        "resource": bool(name and equals),
        **dict.fromkeys(_OTEL_NUMBERS, value.isdecimal() and int(value) > 0),
    }.get(key, False)


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Tracing: where the time of single v2 requests goes"""

    settings: tuple[tuple[str, str], ...] = option(
        TRACE_CONFIG,
        (),
        _parse_trace_setting,
        "KEY=VALUE",
        f"{_TRACE_SETTINGS}. Without a file nothing can be traced in the mode triton; with one, and in the mode "
        "opentelemetry, clients choose levels and rates by /v2/trace/setting. May be given several times",
        is_many=True,
        separator=";",
    )

    def _last(self, key: str, default: str) -> str:
        return next((value for name, value in reversed(self.settings) if name == key), default)

    @property
    def file(self) -> str:
        return self._last("file", "")

    @property
    def levels(self) -> frozenset[str]:
        return frozenset(value for name, value in self.settings if name == "level") - {"OFF"}

    @property
    def rate(self) -> int:
        return int(self._last(_RATE, "1000"))

    @property
    def count(self) -> int:
        return int(self._last(_COUNT, "-1"))

    @property
    def log_frequency(self) -> int:
        return int(self._last(_FREQUENCY, "0"))

    @property
    def mode(self) -> str:
        """`triton` or `opentelemetry`."""
        return self._last("mode", "triton").lower()

    @property
    def url(self) -> str:
        """The collector of the mode `opentelemetry`."""
        return self._last("url", "http://localhost:4318/v1/traces")

    @property
    def resource(self) -> dict[str, str]:
        """The resource's attributes that are asked for."""
        return dict(value.split("=", 1) for key, value in self.settings if key == "resource")

    @property
    def otel_settings(self) -> dict[str, str]:
        """The settings of the mode `opentelemetry` that were given, by Triton's names."""
        return {key: value for key, value in self.settings if key in ("url", "resource", *_OTEL_NUMBERS)}

    def otel_number(self, name: str, default: int) -> int:
        """Return one of the numbers of that mode."""
        return int(self._last(name, str(default)))
