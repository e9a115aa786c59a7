"""The dashboard of the repository's models, by Triton's metrics."""

from deploy.dashboards.panels import Dashboard, Draw, Panel, Query, Row, Unit, Variable, warns
from deploy.dashboards.queries import OF, RATE, rate

_SECONDS = 1e6
"""Microseconds in a second: Triton's durations are in microseconds."""
_STAGES = (
    ("nv_inference_queue_duration_us", "queue"),
    ("nv_inference_compute_input_duration_us", "input"),
    ("nv_inference_compute_infer_duration_us", "inference"),
    ("nv_inference_compute_output_duration_us", "output"),
)


def _rate(metric: str, by: str = "model, version") -> str:
    return rate(metric, by)


def _of_a_request(duration: str) -> str:
    return f"{_rate(duration)} / {_SECONDS:g} / ({_rate('nv_inference_request_success')} > 0)"


def _quantile_of_minute(quantile: str) -> str:
    summary = f'nv_inference_request_summary_us{{{OF}, quantile="{quantile}"}}'
    return f"max by (model, version) ({summary}) / {_SECONDS:g}"


def _first_response(quantile: float) -> str:
    buckets = _rate("nv_inference_first_response_histogram_ms_bucket", "model, le")
    return f"histogram_quantile({quantile}, {buckets}) / 1000"


def _sum(metric: str) -> str:
    return f"sum by (model, version) ({metric}{{{OF}}})"


_REQUESTS = Row(
    "Requests",
    (
        Panel(
            "Successful requests per second",
            "Requests that succeeded, by version.",
            (Query(_rate("nv_inference_request_success"), "{{model}}/{{version}}"),),
            Unit.PER_SECOND,
        ),
        Panel(
            "Failed requests per second, by reason",
            "REJECTED: the queue was full or the wait too long. CANCELED: the client disconnected. BACKEND: the model. "
            "In steady state only CANCELED occurs.",
            (Query(_rate("nv_inference_request_failure", "model, reason"), "{{model}} {{reason}}"),),
            Unit.PER_SECOND,
            Draw.STACKED,
        ),
        Panel(
            "Waiting",
            "Requests that wait for a batch and a free instance. A model with more than a batch waiting is saturated.",
            (Query(_sum("nv_inference_pending_request_count"), "{{model}}/{{version}}"),),
            Unit.COUNT,
        ),
        Panel(
            "Failed loads",
            "Versions and configurations that could not be loaded. The versions loaded before stay in service.",
            (
                Query(
                    'sum by (model) (sluice_model_load_failures_total{instance=~"$instance"}) or vector(0)', "{{model}}"
                ),
            ),
            Unit.COUNT,
            thresholds=warns(1, 5),
        ),
        Panel(
            "Requests per second, by protocol",
            "Requests to language models and the RAG pipeline, by the API of the request.",
            (
                Query(
                    f'sum by (protocol) (rate(sluice_requests_total{{instance=~"$instance"}}[{RATE}]))', "{{protocol}}"
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
            "Mean request time, by stage",
            "More instances or better batching shorten queue time; a faster model or hardware shortens inference.",
            tuple(Query(_of_a_request(duration), f"{{{{model}}}} {stage}") for duration, stage in _STAGES),
            Unit.SECONDS,
            Draw.STACKED,
            width=12,
        ),
        Panel(
            "Mean request time",
            "Time from arrival to the last response.",
            (Query(_of_a_request("nv_inference_request_duration_us"), "{{model}}/{{version}}"),),
            Unit.SECONDS,
            width=12,
        ),
        Panel(
            "Percentiles of the last minute",
            "Time from arrival to the last response. Needs --metrics-config summary_latencies=true.",
            tuple(Query(_quantile_of_minute(q), f"{{{{model}}}} p{float(q) * 100:g}") for q in ("0.5", "0.9", "0.99")),
            Unit.SECONDS,
            width=12,
        ),
        Panel(
            "Time to first response",
            "Time to the first response, streams included. Needs --metrics-config histogram_latencies=true.",
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
            "Inferences and executions per second",
            "A batch of n counts as n inferences and one execution.",
            (
                Query(_rate("nv_inference_count"), "{{model}} inferences"),
                Query(_rate("nv_inference_exec_count"), "{{model}} executions"),
            ),
            Unit.OPERATIONS,
            width=12,
        ),
        Panel(
            "Batch size",
            "Mean number of inferences per execution. Batching works well where it comes near max_batch_size.",
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
            "Hit rate",
            "Share of look-ups that found a response. Below 70 % the cache is too small, or the requests differ.",
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
            "Look-ups per second",
            "Hits and misses of the response cache.",
            (
                Query(_rate("nv_cache_num_hits_per_model"), "{{model}} hits"),
                Query(_rate("nv_cache_num_misses_per_model"), "{{model}} misses"),
            ),
            Unit.OPERATIONS,
        ),
        Panel(
            "Fill",
            "Used share of the cache in memory, and responses evicted per second. Redis has metrics of its own.",
            (
                Query('nv_cache_util{instance=~"$instance"}', "{{instance}} used"),
                Query(f'rate(nv_cache_num_evictions{{instance=~"$instance"}}[{RATE}])', "{{instance}} evicted"),
            ),
            Unit.SHORT,
        ),
    ),
)
_RAG = Row(
    "RAG",
    (
        Panel(
            "Questions per second, by outcome",
            "Requests to /v1/rag, by outcome.",
            (
                Query(
                    f'sum by (outcome) (rate(sluice_requests_total{{instance=~"$instance", protocol="rag"}}[{RATE}]))',
                    "{{outcome}}",
                ),
            ),
            Unit.PER_SECOND,
            Draw.STACKED,
            width=12,
        ),
        Panel(
            "Mean time of the pipeline's steps",
            "The steps encode the question, search, and write the prompt.",
            (
                Query(
                    "sum by (model) (rate(nv_inference_request_duration_us"
                    f'{{instance=~"$instance", model=~"query_encoder|retriever|rag_prompt"}}[{RATE}])) / {_SECONDS:g} '
                    "/ (sum by (model) (rate(nv_inference_request_success"
                    f'{{instance=~"$instance", model=~"query_encoder|retriever|rag_prompt"}}[{RATE}])) > 0)',
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
    "Models of the repository, by Triton's metrics: requests, their time by stage, batches and caches.",
    (Variable("instance", 'up{job="sluice"}', "instance"), Variable("model", "nv_inference_request_success", "model")),
    (_REQUESTS, _LATENCY, _BATCHING, _CACHE, _RAG),
)
