"""The options of `sluice serve` for the metrics page, under tritonserver's names."""

from dataclasses import dataclass

from gateway.options.metrics_settings import MetricsSettings, metrics_settings
from gateway.options.option import ConfigError, integer, option, text_of, truth
from sluice.errors import SluiceError

_FLAG = "BOOL"


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Metrics: Prometheus"""

    port: int = option("--metrics-port", 8002, integer(0, 65535), "PORT", "port of GET /metrics; 0 takes a free one")
    host: str | None = option(
        "--metrics-address",
        None,
        text_of("a host name or address"),
        "ADDRESS",
        "address to listen on for metrics. Default: that of --host",
    )
    is_allowed: bool = option("--allow-metrics", True, truth, _FLAG, "serve metrics at all")
    allows_cpu: bool = option("--allow-cpu-metrics", True, truth, _FLAG, "tell of the machine's processors and memory")
    allows_gpu: bool = option("--allow-gpu-metrics", True, truth, _FLAG, "tell of GPUs, where there are any")
    interval_ms: int = option(
        "--metrics-interval-ms",
        2000,
        integer(1),
        "MILLISECONDS",
        "how old what is told of the machine and its GPUs may be",
    )
    settings: tuple[str, ...] = option(
        "--metrics-config",
        (),
        text_of("KEY=VALUE, such as summary_latencies=true"),
        "KEY=VALUE",
        "counter_latencies, summary_latencies, histogram_latencies: true or false; summary_quantiles=0.5:0.05,...; "
        "triton_infer_aliases=true adds the triton_infer_* names of older dashboards. May be given several times",
        is_many=True,
        separator=";",
    )

    def __post_init__(self) -> None:
        """Check what options say together. Raises ConfigError."""
        self.parsed()

    def parsed(self) -> MetricsSettings:
        """What the page shows. Raises ConfigError."""
        try:
            return metrics_settings(
                self.settings,
                is_allowed=self.is_allowed,
                allows_cpu=self.allows_cpu,
                allows_gpu=self.allows_gpu,
                interval_ms=self.interval_ms,
            )
        except SluiceError as error:
            raise ConfigError(error.message) from None
