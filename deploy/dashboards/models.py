"""Models of the repository: Triton's families."""

from deploy.dashboards.panels import Dashboard, Draw, Panel, Query, Row, Unit, Variable, warns

_OF = 'instance=~"$instance", model=~"$model"'
_RATE = "$__rate_interval"
_SECONDS = 1e6
"""Microseconds in one; Triton's durations are microseconds."""
_STAGES = (
    ("nv_inference_queue_duration_us", "queue"),
    ("nv_inference_compute_input_duration_us", "input"),
    ("nv_inference_compute_infer_duration_us", "inference"),
    ("nv_inference_compute_output_duration_us", "output"),
)


def _rate(metric: str, by: str = "model, version", also: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{_OF}{also}}}[{_RATE}]))"


def _of_a_request(duration: str) -> str:
    return f"{_rate(duration)} / {_SECONDS:g} / ({_rate('nv_inference_request_success')} > 0)"


def _quantile_of_minute(quantile: str) -> str:
    summary = f'nv_inference_request_summary_us{{{_OF}, quantile="{quantile}"}}'
    return f"max by (model, version) ({summary}) / {_SECONDS:g}"


def _first_response(quantile: float) -> str:
    buckets = _rate("nv_inference_first_response_histogram_ms_bucket", "model, le")
    return f"histogram_quantile({quantile}, {buckets}) / 1000"


def _sum(metric: str) -> str:
    return f"sum by (model, version) ({metric}{{{_OF}}})"


_REQUESTS = Row(
    "Requests",
    (
        Panel(
            "Answered in a second",
            "Requests that succeeded.",
            (Query(_rate("nv_inference_request_success"), "{{model}}/{{version}}"),),
            Unit.PER_SECOND,
        ),
        Panel(
            "Failed in a second, by reason",
            "REJECTED: the queue was full or the wait too long. CANCELED: the client left. BACKEND: the model. "
            "In steady state only clients leave.",
            (Query(_rate("nv_inference_request_failure", "model, reason"), "{{model}} {{reason}}"),),
            Unit.PER_SECOND,
            Draw.STACKED,
        ),
        Panel(
            "Waiting",
            "Requests that wait for a batch and a free instance. More than a batch for long: saturated.",
            (Query(_sum("nv_inference_pending_request_count"), "{{model}}/{{version}}"),),
            Unit.COUNT,
        ),
        Panel(
            "Loads that failed",
            "Versions and configurations that could not be loaded. What served before goes on.",
            (
                Query(
                    'sum by (model) (sluice_model_load_failures_total{instance=~"$instance"}) or vector(0)', "{{model}}"
                ),
            ),
            Unit.COUNT,
            thresholds=warns(1, 5),
        ),
        Panel(
            "Requests of a protocol in a second",
            "Language models and the RAG pipeline, by the API that they were asked by.",
            (
                Query(
                    f'sum by (protocol) (rate(sluice_requests_total{{instance=~"$instance"}}[{_RATE}]))', "{{protocol}}"
                ),
            ),
            Unit.PER_SECOND,
            Draw.STACKED,
            width=16,
        ),
    ),
)
_LATENCY = Row(
    "Latency",
    (
        Panel(
            "Mean time of a request, by stage",
            "Queue: more instances or better batching help. Inference: a better model or faster hardware does.",
            tuple(Query(_of_a_request(duration), f"{{{{model}}}} {stage}") for duration, stage in _STAGES),
            Unit.SECONDS,
            Draw.STACKED,
            width=12,
        ),
        Panel(
            "Mean time of a request, whole",
            "From arrival to the last response.",
            (Query(_of_a_request("nv_inference_request_duration_us"), "{{model}}/{{version}}"),),
            Unit.SECONDS,
            width=12,
        ),
        Panel(
            "Percentiles of the last minute",
            "From arrival to the last response. Needs --metrics-config summary_latencies=true.",
            tuple(Query(_quantile_of_minute(q), f"{{{{model}}}} p{float(q) * 100:g}") for q in ("0.5", "0.9", "0.99")),
            Unit.SECONDS,
            width=12,
        ),
        Panel(
            "Time to the first response",
            "Of every kind of model, streams included. Needs --metrics-config histogram_latencies=true.",
            tuple(Query(_first_response(q), f"{{{{model}}}} p{q * 100:g}") for q in (0.5, 0.99)),
            Unit.SECONDS,
            width=12,
        ),
    ),
)
_BATCHING = Row(
    "Batching",
    (
        Panel(
            "Inferences and executions in a second",
            "A batch of n is n inferences and one execution.",
            (
                Query(_rate("nv_inference_count"), "{{model}} inferences"),
                Query(_rate("nv_inference_exec_count"), "{{model}} executions"),
            ),
            Unit.OPERATIONS,
            width=12,
        ),
        Panel(
            "Size of a batch",
            "Mean number of inferences in an execution. The nearer to max_batch_size, the better batching works.",
            (
                Query(
                    f"{_rate('nv_inference_count')} / ({_rate('nv_inference_exec_count')} > 0)", "{{model}}/{{version}}"
                ),
            ),
            Unit.SHORT,
            width=12,
        ),
    ),
)
_CACHE = Row(
    "Response cache",
    (
        Panel(
            "Hits",
            "Share of look-ups that found the answer. Below 70 % the cache is too small, or the requests differ.",
            (
                Query(
                    f"{_rate('nv_cache_num_hits_per_model')} / ({_rate('nv_cache_num_hits_per_model')} "
                    f"+ {_rate('nv_cache_num_misses_per_model')} > 0)",
                    "{{model}}/{{version}}",
                ),
            ),
            Unit.SHARE,
            max=1,
        ),
        Panel(
            "Look-ups in a second",
            "Hits and misses.",
            (
                Query(_rate("nv_cache_num_hits_per_model"), "{{model}} hits"),
                Query(_rate("nv_cache_num_misses_per_model"), "{{model}} misses"),
            ),
            Unit.OPERATIONS,
        ),
        Panel(
            "Fill",
            "Share of the cache in memory that is used, and responses evicted in a second. Of Redis ask Redis.",
            (
                Query('nv_cache_util{instance=~"$instance"}', "{{instance}} used"),
                Query(f'rate(nv_cache_num_evictions{{instance=~"$instance"}}[{_RATE}])', "{{instance}} evicted"),
            ),
            Unit.SHORT,
        ),
    ),
)
_RAG = Row(
    "Answers from documents",
    (
        Panel(
            "Questions in a second, by outcome",
            "What came by /v1/rag.",
            (
                Query(
                    f'sum by (outcome) (rate(sluice_requests_total{{instance=~"$instance", protocol="rag"}}[{_RATE}]))',
                    "{{outcome}}",
                ),
            ),
            Unit.PER_SECOND,
            Draw.STACKED,
            width=12,
        ),
        Panel(
            "Mean time of the pipeline's steps",
            "Encoding the question, searching, writing the prompt.",
            (
                Query(
                    "sum by (model) (rate(nv_inference_request_duration_us"
                    f'{{instance=~"$instance", model=~"query_encoder|retriever|rag_prompt"}}[{_RATE}])) / {_SECONDS:g} '
                    "/ (sum by (model) (rate(nv_inference_request_success"
                    f'{{instance=~"$instance", model=~"query_encoder|retriever|rag_prompt"}}[{_RATE}])) > 0)',
                    "{{model}}",
                ),
            ),
            Unit.SECONDS,
            Draw.STACKED,
            width=12,
        ),
    ),
)

MODELS = Dashboard(
    "sluice-models",
    "Sluice: models",
    "Models of the repository, by Triton's metrics: requests, where their time goes, batches and caches.",
    (Variable("instance", 'up{job="sluice"}', "instance"), Variable("model", "nv_inference_request_success", "model")),
    (_REQUESTS, _LATENCY, _BATCHING, _CACHE, _RAG),
)
