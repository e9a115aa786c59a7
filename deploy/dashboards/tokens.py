"""The dashboard of tokens: throughput and latency of language models, and what limits them."""

from deploy.dashboards.engine_rows import ENGINE, KV, QUEUE, STEPS
from deploy.dashboards.panels import Dashboard, Draw, Panel, Query, Row, Unit, Variable, warns
from deploy.dashboards.queries import FAILED, HERE, MET, OF, RATE, lengths, percentiles, rate
from deploy.dashboards.use_rows import USE

NOW = Row(
    "Now",
    (
        Panel(
            "Ready",
            "Whether the server is ready for requests, as /v2/health/ready reports.",
            (Query(f"min(sluice_ready{{{HERE}}})"),),
            draw=Draw.NUMBER,
            width=3,
            words=(("0", "no", "red"), ("1", "yes", "green")),
        ),
        Panel(
            "Generated",
            "Tokens sent to clients per second, by all selected models.",
            (Query(f"sum(rate(sluice_generation_tokens_total{{{OF}}}[{RATE}]))"),),
            Unit.RATE,
            Draw.NUMBER,
            3,
        ),
        Panel(
            "Requests",
            "Requests that ended, per second.",
            (Query(f"sum(rate(sluice_requests_total{{{OF}}}[{RATE}]))"),),
            Unit.PER_SECOND,
            Draw.NUMBER,
            3,
        ),
        Panel(
            "Failed",
            "Share of requests that the server failed: overloaded, unavailable, past a deadline, or by a fault of its "
            "own. Clients that disconnect or send bad requests do not count. 0.1 % raises an alert.",
            (
                Query(
                    f"(sum(rate(sluice_requests_total{{{OF}, {FAILED}}}[5m])) or vector(0)) "
                    f"/ (sum(rate(sluice_requests_total{{{OF}}}[5m])) > 0)"
                ),
            ),
            Unit.SHARE,
            Draw.NUMBER,
            3,
            warns(0.0005, 0.001),
            decimals=2,
        ),
        Panel(
            "Running",
            "Sequences that run and hold KV blocks.",
            (Query(f"sum(sluice_sequences_running{{{OF}}})"),),
            Unit.COUNT,
            Draw.NUMBER,
            3,
        ),
        Panel(
            "Waiting",
            "Requests that wait for admission. With more waiting than running the server is saturated.",
            (Query(f"sum(sluice_sequences_waiting{{{OF}}})"),),
            Unit.COUNT,
            Draw.NUMBER,
            3,
            warns(1, 64),
        ),
        Panel(
            "Predicted wait",
            "Predicted wait of a new request, the longest among the selected models.",
            (Query(f"max(sluice_predicted_wait_seconds{{{OF}}})"),),
            Unit.SECONDS,
            Draw.NUMBER,
            3,
            warns(2, 10),
        ),
        Panel(
            "KV reserved",
            "Share of KV blocks that the running sequences may need. At 100 % the next request waits.",
            (
                Query(
                    f"max(sluice_kv_blocks_reserved{{{OF}}} "
                    f"/ (sluice_kv_blocks_used{{{OF}}} + sluice_kv_blocks_free{{{OF}}} > 0))"
                ),
            ),
            Unit.SHARE,
            Draw.NUMBER,
            3,
            warns(0.85, 0.95),
            max=1,
        ),
    ),
)
THROUGHPUT = Row(
    "Throughput",
    (
        Panel(
            "Tokens per second, by model and kind",
            "generation: sent to clients. prompt: of answered requests. cached: prompt tokens that were found in the "
            "KV cache instead of computed.",
            (
                Query(rate("sluice_tokens_total", "model, kind"), "{{model}} {{kind}}"),
                Query(rate("sluice_engine_cached_tokens_total"), "{{model}} cached"),
            ),
            Unit.RATE,
            width=12,
        ),
        Panel(
            "Tokens per second, by kind",
            "prompt, and cached of it; generation, and aborted of it: tokens of answers that were cut off. draft "
            "accepted: tokens that speculation guessed right.",
            (
                Query(rate("sluice_tokens_total", "kind"), "{{kind}}"),
                Query(f"sum(rate(sluice_engine_accepted_tokens_total{{{OF}}}[{RATE}]))", "draft accepted"),
            ),
            Unit.RATE,
            width=12,
        ),
        Panel(
            "Tokens per request",
            "Median and 90th percentile of the lengths of prompts and answers.",
            (
                *lengths("sluice_request_prompt_tokens", "prompt"),
                *lengths("sluice_request_generation_tokens", "answer"),
            ),
            Unit.SHORT,
            width=12,
        ),
        Panel(
            "Requests per second, by outcome",
            "ok, cancelled (the client disconnected), or the error code that ended the request.",
            (Query(rate("sluice_requests_total", "model, outcome"), "{{model}} {{outcome}}"),),
            Unit.PER_SECOND,
            Draw.STACKED,
            width=12,
        ),
        Panel(
            "Tokens per second, by protocol",
            "Tokens sent to clients, by the API of the request.",
            (Query(rate("sluice_tokens_total", "protocol", ', kind="generation"'), "{{protocol}}"),),
            Unit.RATE,
            Draw.STACKED,
            width=6,
        ),
        Panel(
            "Open requests",
            "Requests that have reached a model and have not ended, waiting ones included.",
            (Query(f"sum by (model, protocol) (sluice_open_requests{{{OF}}})", "{{model}} {{protocol}}"),),
            Unit.COUNT,
            Draw.STACKED,
            width=6,
        ),
        Panel(
            "HTTP responses per second, by status",
            "HTTP responses, rejections included. A stream that fails after its first event counts as 200.",
            (
                Query(
                    f"sum by (protocol, status) (rate(sluice_http_responses_total{{{HERE}}}[{RATE}]))",
                    "{{protocol}} {{status}}",
                ),
            ),
            Unit.PER_SECOND,
            Draw.STACKED,
            width=12,
        ),
    ),
)
GOODPUT = Row(
    "Goodput",
    (
        Panel(
            "Requests in target",
            "Share of requests that met every target of --slo, which failures of the server miss. Empty without --slo.",
            (
                Query(
                    f"{rate('sluice_goodput_requests_total', 'model', MET)} "
                    f"/ ({rate('sluice_goodput_requests_total')} > 0)",
                    "{{model}}",
                ),
            ),
            Unit.SHARE,
            max=1,
        ),
        Panel(
            "Requests per second, in target or not",
            "Requests per second that met every target, and those that missed one.",
            (Query(rate("sluice_goodput_requests_total", "model, result"), "{{model}} {{result}}"),),
            Unit.PER_SECOND,
            Draw.STACKED,
        ),
        Panel(
            "Missed targets",
            "Requests per second by the target that they missed; one that missed several counts in each. error: the "
            "server failed.",
            (Query(rate("sluice_goodput_misses_total", "model, target"), "{{model}} {{target}}"),),
            Unit.PER_SECOND,
            Draw.STACKED,
        ),
    ),
)
LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "Time from accepting a request to its first text: tokenizing, queueing and prefill.",
            percentiles("sluice_time_to_first_token_seconds"),
            Unit.SECONDS,
            width=6,
        ),
        Panel(
            "Inter-token latency",
            "Gap between successive events of a request. Tokens that wait for a slow reader share one event.",
            percentiles("sluice_inter_token_latency_seconds"),
            Unit.SECONDS,
            width=6,
        ),
        Panel(
            "Time per output token",
            "Mean time of each token after the first, of answered requests.",
            percentiles("sluice_time_per_output_token_seconds"),
            Unit.SECONDS,
            width=6,
        ),
        Panel(
            "Request duration",
            "Time from accepting a request to its end. Long answers take long: see Tokens per request.",
            percentiles("sluice_request_duration_seconds"),
            Unit.SECONDS,
            width=6,
        ),
        Panel(
            "Distribution of the time to first token",
            "Times of all requests. Two bands: some requests wait, or some find their prompt in the cache.",
            (
                Query(
                    f"sum by (le) (increase(sluice_time_to_first_token_seconds_bucket{{{OF}}}[{RATE}]))",
                    "{{le}}",
                ),
            ),
            Unit.SECONDS,
            Draw.HEATMAP,
            width=12,
        ),
        Panel(
            "99th percentile over its baseline",
            "The baseline is the median of the last day. 2 raises an alert. Empty in Prometheus's first hour.",
            (
                Query(
                    'job_model:sluice_latency_seconds:p99_5m{model=~"$model"} '
                    '/ job_model:sluice_latency_seconds:p99_baseline{model=~"$model"}',
                    "{{model}} {{latency}}",
                ),
            ),
            Unit.COUNT,
            width=12,
            thresholds=warns(1.5, 2),
            decimals=2,
        ),
    ),
)


TOKENS = Dashboard(
    "sluice-tokens",
    "Sluice: tokens",
    "Throughput and latency of language models, and what limits them.",
    (Variable("instance", 'up{job="sluice"}', "instance"), Variable("model", "sluice_sequences_running", "model")),
    (NOW, THROUGHPUT, GOODPUT, LATENCY, QUEUE, KV, STEPS, USE, ENGINE),
)
