"""What TensorRT-LLM tells of itself, and what the adapter watches."""

from engine.delegated.tensorrt_llm.configuration.parsing import boolean, count, number, positive, text
from engine.delegated.tensorrt_llm.configuration.setting import Setting

STATISTICS = (
    Setting(
        "enable_iter_perf_stats",
        "enable_iter_perf_stats",
        boolean,
        "Statistics of each iteration. Default: true; metrics and the predicted wait are made of them.",
        pytorch_only=True,
    ),
    Setting(
        "enable_iter_req_stats",
        "enable_iter_req_stats",
        boolean,
        "Statistics of each request in each iteration.",
        pytorch_only=True,
    ),
    Setting("iter_stats_max_iterations", "iter_stats_max_iterations", count, "Iterations whose statistics are kept."),
    Setting(
        "request_stats_max_iterations",
        "request_stats_max_iterations",
        count,
        "The same for statistics of requests.",
    ),
    Setting("max_stats_len", "max_stats_len", positive, "Statistics kept until read.", since="1.3", pytorch_only=True),
    Setting(
        "return_perf_metrics",
        "return_perf_metrics",
        boolean,
        "Times and cache use of each request. Default: true; cached tokens are read from them.",
    ),
    Setting("perf_metrics_max_requests", "perf_metrics_max_requests", count, "Requests whose metrics are kept."),
    Setting("print_iter_log", "print_iter_log", boolean, "Log each iteration.", pytorch_only=True),
    Setting(
        "enable_layerwise_nvtx_marker",
        "enable_layerwise_nvtx_marker",
        boolean,
        "Mark layers for NVIDIA's profiler.",
        pytorch_only=True,
    ),
    Setting("otlp_traces_endpoint", "otlp_traces_endpoint", text, "Where traces are sent.", since="1.3"),
    Setting(
        "stall_timeout_s",
        "",
        number(0.0),
        "Seconds without any output, while requests run, after which the engine counts as hung and is started again.",
    ),
)
