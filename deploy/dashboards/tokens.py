"""What language models are asked, and how fast they answer."""

from deploy.dashboards.engine_rows import ENGINE, KV, QUEUE, STEPS
from deploy.dashboards.panels import Dashboard, Draw, Panel, Query, Row, Unit, Variable, warns
from deploy.dashboards.queries import FAILED, HERE, OF, RATE, lengths, percentiles, rate

NOW = Row(
    "Now",
    (
        Panel(
            "Ready",
            "Whether new requests are served: what /v2/health/ready says.",
            (Query(f"min(sluice_ready{{{HERE}}})"),),
            draw=Draw.NUMBER,
            width=3,
            words=(("0", "no", "red"), ("1", "yes", "green")),
        ),
        Panel(
            "Generated",
            "Tokens sent to clients in a second, of all models chosen.",
            (Query(f"sum(rate(sluice_generation_tokens_total{{{OF}}}[{RATE}]))"),),
            Unit.RATE,
            Draw.NUMBER,
            3,
        ),
        Panel(
            "Requests",
            "Requests that ended, in a second.",
            (Query(f"sum(rate(sluice_requests_total{{{OF}}}[{RATE}]))"),),
            Unit.PER_SECOND,
            Draw.NUMBER,
            3,
        ),
        Panel(
            "Failed",
            "Share of requests that the server failed: overloaded, unavailable, past a deadline, or by a fault of its "
            "own. Clients that leave or ask wrongly do not count. 0.1 % alerts.",
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
            "Sequences that hold KV blocks and run.",
            (Query(f"sum(sluice_sequences_running{{{OF}}})"),),
            Unit.COUNT,
            Draw.NUMBER,
            3,
        ),
        Panel(
            "Waiting",
            "Requests that wait to be admitted. More than run: saturated.",
            (Query(f"sum(sluice_sequences_waiting{{{OF}}})"),),
            Unit.COUNT,
            Draw.NUMBER,
            3,
            warns(1, 64),
        ),
        Panel(
            "Predicted wait",
            "How long a request that came now is thought to wait, at the worst of the models chosen.",
            (Query(f"max(sluice_predicted_wait_seconds{{{OF}}})"),),
            Unit.SECONDS,
            Draw.NUMBER,
            3,
            warns(2, 10),
        ),
        Panel(
            "KV reserved",
            "Share of KV blocks that the running sequences may come to need; at 100 % the next one waits.",
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
            "Tokens in a second, by model and kind",
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
            "Requests in a second, by outcome",
            "ok, cancelled (the client left), or the error code that ended the request.",
            (Query(rate("sluice_requests_total", "model, outcome"), "{{model}} {{outcome}}"),),
            Unit.PER_SECOND,
            Draw.STACKED,
            width=12,
        ),
        Panel(
            "Tokens in a second, by protocol",
            "Tokens sent to clients, by the API that they were asked by.",
            (Query(rate("sluice_tokens_total", "protocol", ', kind="generation"'), "{{protocol}}"),),
            Unit.RATE,
            Draw.STACKED,
            width=6,
        ),
        Panel(
            "Open requests",
            "Requests that have reached a model and not ended, waiting ones included.",
            (Query(f"sum by (model, protocol) (sluice_open_requests{{{OF}}})", "{{model}} {{protocol}}"),),
            Unit.COUNT,
            Draw.STACKED,
            width=6,
        ),
        Panel(
            "HTTP answers in a second, by status",
            "Refused ones included. A stream that fails after its first event counts as 200 here.",
            (
                Query(
                    f"sum by (protocol, status) (rate(sluice_http_responses_total{{{HERE}}}[{RATE}]))",
                    "{{protocol}} {{status}}",
                ),
            ),
            Unit.PER_SECOND,
            Draw.STACKED,
            width=6,
        ),
        Panel(
            "Tokens of a request",
            "Median and 90th percentile of the lengths of prompts and answers.",
            (
                *lengths("nv_llm_input_token_len", "prompt"),
                *lengths("nv_llm_output_token_len", "answer"),
            ),
            Unit.SHORT,
            width=6,
        ),
    ),
)
LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "From taking a request to its first text: tokenizing, queueing and prefill.",
            percentiles("sluice_time_to_first_token_seconds"),
            Unit.SECONDS,
            width=6,
        ),
        Panel(
            "Inter-token latency",
            "Gap between successive events of one request. Tokens that a slow reader left waiting come merged in one.",
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
            "Whole request",
            "From taking a request to its end, however it ended. Long answers take long: see the tokens of a request.",
            percentiles("sluice_request_duration_seconds"),
            Unit.SECONDS,
            width=6,
        ),
        Panel(
            "Time to first token, all requests",
            "Where the requests of each moment lie. Two bands: some wait, or some find their prompt in the cache.",
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
            "99th percentile against the usual one",
            "1 is the median of the last day's; 2 alerts. Empty in the first hour of a new Prometheus.",
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
    "Throughput and latency of language models, and what bounds them.",
    (Variable("instance", 'up{job="sluice"}', "instance"), Variable("model", "sluice_sequences_running", "model")),
    (NOW, THROUGHPUT, LATENCY, QUEUE, KV, STEPS, ENGINE),
)
