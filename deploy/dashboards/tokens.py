"""Tokens: what language models are asked, how fast they answer, and what bounds them."""

from deploy.dashboards.panels import Dashboard, Draw, Panel, Query, Row, Threshold, Unit, Variable, warns

_OF = 'instance=~"$instance", model=~"$model"'
_HERE = 'instance=~"$instance"'
_FAILED = 'outcome=~"internal|unknown|unavailable|overloaded|deadline"'
_RATE = "$__rate_interval"
_PERCENTILES = (0.5, 0.9, 0.99)


def _rate(metric: str, by: str = "model", also: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{_OF}{also}}}[{_RATE}]))"


def _sum(metric: str) -> str:
    return f"sum by (model) ({metric}{{{_OF}}})"


def _percentiles(histogram: str) -> tuple[Query, ...]:
    buckets = f"sum by (model, le) (rate({histogram}_bucket{{{_OF}}}[{_RATE}]))"
    return tuple(Query(f"histogram_quantile({q}, {buckets})", f"{{{{model}}}} p{q * 100:g}") for q in _PERCENTILES)


def _lengths(histogram: str, name: str) -> tuple[Query, ...]:
    buckets = _rate(f"{histogram}_bucket", "model, le")
    return tuple(Query(f"histogram_quantile({q}, {buckets})", f"{{{{model}}}} {name} p{q * 100:g}") for q in (0.5, 0.9))


def _ratio(above: str, *below: str) -> str:
    return f"{_rate(above)} / ({' + '.join(_rate(each) for each in below)} > 0)"


_NOW = Row(
    "Now",
    (
        Panel(
            "Ready",
            "Whether new requests are served: what /v2/health/ready says.",
            (Query(f"min(sluice_ready{{{_HERE}}})"),),
            draw=Draw.NUMBER,
            width=3,
            words=(("0", "no", "red"), ("1", "yes", "green")),
        ),
        Panel(
            "Generated",
            "Tokens sent to clients in a second, of all models chosen.",
            (Query(f"sum(rate(sluice_generation_tokens_total{{{_OF}}}[{_RATE}]))"),),
            Unit.RATE,
            Draw.NUMBER,
            3,
        ),
        Panel(
            "Requests",
            "Requests that ended, in a second.",
            (Query(f"sum(rate(sluice_requests_total{{{_OF}}}[{_RATE}]))"),),
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
                    f"(sum(rate(sluice_requests_total{{{_OF}, {_FAILED}}}[5m])) or vector(0)) "
                    f"/ (sum(rate(sluice_requests_total{{{_OF}}}[5m])) > 0)"
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
            (Query(f"sum(sluice_sequences_running{{{_OF}}})"),),
            Unit.COUNT,
            Draw.NUMBER,
            3,
        ),
        Panel(
            "Waiting",
            "Requests that wait to be admitted. More than run: saturated.",
            (Query(f"sum(sluice_sequences_waiting{{{_OF}}})"),),
            Unit.COUNT,
            Draw.NUMBER,
            3,
            warns(1, 64),
        ),
        Panel(
            "Predicted wait",
            "How long a request that came now is thought to wait, at the worst of the models chosen.",
            (Query(f"max(sluice_predicted_wait_seconds{{{_OF}}})"),),
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
                    f"max(sluice_kv_blocks_reserved{{{_OF}}} "
                    f"/ (sluice_kv_blocks_used{{{_OF}}} + sluice_kv_blocks_free{{{_OF}}} > 0))"
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
_THROUGHPUT = Row(
    "Throughput",
    (
        Panel(
            "Tokens in a second, by model and kind",
            "generation: sent to clients. prompt: of answered requests. cached: prompt tokens that were found in the "
            "KV cache instead of computed.",
            (
                Query(_rate("sluice_tokens_total", "model, kind"), "{{model}} {{kind}}"),
                Query(_rate("sluice_engine_cached_tokens_total"), "{{model}} cached"),
            ),
            Unit.RATE,
            width=12,
        ),
        Panel(
            "Requests in a second, by outcome",
            "ok, cancelled (the client left), or the error code that ended the request.",
            (Query(_rate("sluice_requests_total", "model, outcome"), "{{model}} {{outcome}}"),),
            Unit.PER_SECOND,
            Draw.STACKED,
            width=12,
        ),
        Panel(
            "Tokens in a second, by protocol",
            "Tokens sent to clients, by the API that they were asked by.",
            (Query(_rate("sluice_tokens_total", "protocol", ', kind="generation"'), "{{protocol}}"),),
            Unit.RATE,
            Draw.STACKED,
            width=6,
        ),
        Panel(
            "Open requests",
            "Requests that have reached a model and not ended, waiting ones included.",
            (Query(f"sum by (model, protocol) (sluice_open_requests{{{_OF}}})", "{{model}} {{protocol}}"),),
            Unit.COUNT,
            Draw.STACKED,
            width=6,
        ),
        Panel(
            "HTTP answers in a second, by status",
            "Refused ones included. A stream that fails after its first event counts as 200 here.",
            (
                Query(
                    f"sum by (protocol, status) (rate(sluice_http_responses_total{{{_HERE}}}[{_RATE}]))",
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
                *_lengths("nv_llm_input_token_len", "prompt"),
                *_lengths("nv_llm_output_token_len", "answer"),
            ),
            Unit.SHORT,
            width=6,
        ),
    ),
)
_LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "From taking a request to its first text: tokenizing, queueing and prefill.",
            _percentiles("sluice_time_to_first_token_seconds"),
            Unit.SECONDS,
            width=6,
        ),
        Panel(
            "Inter-token latency",
            "Gap between successive events of one request. Tokens that a slow reader left waiting come merged in one.",
            _percentiles("sluice_inter_token_latency_seconds"),
            Unit.SECONDS,
            width=6,
        ),
        Panel(
            "Time per output token",
            "Mean time of each token after the first, of answered requests.",
            _percentiles("sluice_time_per_output_token_seconds"),
            Unit.SECONDS,
            width=6,
        ),
        Panel(
            "Whole request",
            "From taking a request to its end, however it ended. Long answers take long: see the tokens of a request.",
            _percentiles("sluice_request_duration_seconds"),
            Unit.SECONDS,
            width=6,
        ),
        Panel(
            "Time to first token, all requests",
            "Where the requests of each moment lie. Two bands: some wait, or some find their prompt in the cache.",
            (
                Query(
                    f"sum by (le) (increase(sluice_time_to_first_token_seconds_bucket{{{_OF}}}[{_RATE}]))",
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
_QUEUE = Row(
    "Queue",
    (
        Panel(
            "Running and waiting",
            "Sequences that run, requests that wait to be admitted, and the most that one step runs.",
            (
                Query(f"max by (model) (sluice_engine_max_num_seqs{{{_OF}}})", "{{model}} most"),
                Query(_sum("sluice_sequences_running"), "{{model}} running"),
                Query(_sum("sluice_sequences_waiting"), "{{model}} waiting"),
            ),
            Unit.COUNT,
        ),
        Panel(
            "Prompt tokens that wait",
            "--max-queue-tokens bounds them.",
            (Query(_sum("sluice_tokens_waiting"), "{{model}}"),),
            Unit.SHORT,
        ),
        Panel(
            "Wait to be admitted",
            "Predicted for a request that came now; mean of those admitted; and by how much the predictions were off.",
            (
                Query(f"max by (model) (sluice_predicted_wait_seconds{{{_OF}}})", "{{model}} predicted"),
                Query(_ratio("sluice_engine_wait_seconds_total", "sluice_engine_waits_total"), "{{model}} mean"),
                Query(
                    _ratio("sluice_engine_wait_error_seconds_total", "sluice_engine_waits_total"),
                    "{{model}} mean error",
                ),
            ),
            Unit.SECONDS,
        ),
    ),
)
_KV = Row(
    "KV cache",
    (
        Panel(
            "KV blocks",
            "Used: held by running sequences. Cached: free, with a prefix that a request could reuse. Free: neither. "
            "Reserved (used included): what the running ones may come to need; admission is by this.",
            (
                Query(_sum("sluice_kv_blocks_used"), "{{model}} used"),
                Query(_sum("sluice_kv_blocks_cached"), "{{model}} cached"),
                Query(f"{_sum('sluice_kv_blocks_free')} - {_sum('sluice_kv_blocks_cached')}", "{{model}} free"),
                Query(_sum("sluice_kv_blocks_reserved"), "{{model}} reserved"),
            ),
            Unit.SHORT,
            width=12,
        ),
        Panel(
            "Prompt tokens found in the cache",
            "Share of prompt tokens that were not computed, because a request before had the same beginning.",
            (
                Query(
                    _ratio(
                        "sluice_engine_cached_tokens_total",
                        "sluice_engine_cached_tokens_total",
                        "sluice_engine_prompt_tokens_total",
                    ),
                    "{{model}}",
                ),
            ),
            Unit.SHARE,
            width=6,
            max=1,
        ),
        Panel(
            "Pauses for want of blocks",
            "Sequences that were paused, and tokens computed again for them. 0 unless the policy is max_utilization.",
            (
                Query(_rate("sluice_engine_preemptions_total"), "{{model}} pauses"),
                Query(_rate("sluice_engine_recomputed_tokens_total"), "{{model}} tokens again"),
            ),
            Unit.OPERATIONS,
            width=6,
        ),
    ),
)
_STEPS = Row(
    "Batches and steps",
    (
        Panel(
            "Steps in a second",
            "Each is one plan and one forward pass of the whole batch.",
            (Query(_rate("sluice_engine_steps_total"), "{{model}}"),),
            Unit.OPERATIONS,
            width=6,
        ),
        Panel(
            "Tokens of a step",
            "The batch: tokens sampled (with no speculation: sequences), and prompt tokens computed beside them.",
            (
                Query(
                    _ratio("sluice_engine_generation_tokens_total", "sluice_engine_steps_total"), "{{model}} generated"
                ),
                Query(_ratio("sluice_engine_prompt_tokens_total", "sluice_engine_steps_total"), "{{model}} prompt"),
            ),
            Unit.SHORT,
            width=6,
        ),
        Panel(
            "Time of a step",
            "runner: the model. overhead: planning, sampling and everything else.",
            (
                Query(
                    f"{_rate('sluice_engine_seconds_total', 'model, part')} "
                    f"/ on (model) group_left () ({_rate('sluice_engine_steps_total')} > 0)",
                    "{{model}} {{part}}",
                ),
            ),
            Unit.SECONDS,
            Draw.STACKED,
            width=6,
        ),
        Panel(
            "Drafts that were accepted",
            "Share of speculation's draft tokens that the model agreed with. 0 where there is no speculation.",
            (
                Query(
                    f"{_rate('sluice_engine_accepted_tokens_total')} "
                    f"/ clamp_min({_rate('sluice_engine_draft_tokens_total')}, 1e-9)",
                    "{{model}}",
                ),
            ),
            Unit.SHARE,
            width=6,
            max=1,
        ),
    ),
)
_ENGINE = Row(
    "Engine and server",
    (
        Panel(
            "Engines",
            "What runs each model.",
            (
                Query(
                    f"sluice_engine_info{{{_OF}}}",
                    "{{model}}: {{runtime}} {{runtime_version}}, {{model_type}}, {{dtype}}, {{num_gpus}} GPUs",
                ),
            ),
            Unit.COUNT,
            Draw.NAMES,
            width=12,
        ),
        Panel(
            "Time to load",
            "How long each engine took to load its model; a recovery after a crash takes as long.",
            (Query(f"max by (model) (sluice_engine_load_seconds{{{_OF}}})", "{{model}}"),),
            Unit.SECONDS,
            Draw.NUMBER,
            width=12,
            thresholds=(Threshold(5, "orange"),),
        ),
        Panel(
            "Engines replaced",
            "Engines that crashed or hung, requests that went on in the next one, and requests that were failed as "
            "engines crashed on them.",
            (
                Query(f"sum by (model) (increase(sluice_engine_restarts_total{{{_OF}}}[5m]))", "{{model}} restarts"),
                Query(
                    f"sum by (model) (increase(sluice_engine_resumed_requests_total{{{_OF}}}[5m]))",
                    "{{model}} requests resumed",
                ),
                Query(
                    f"sum by (model) (increase(sluice_engine_poisoned_requests_total{{{_OF}}}[5m]))",
                    "{{model}} requests failed",
                ),
            ),
            Unit.SHORT,
            width=6,
        ),
        Panel(
            "Silence of the engine",
            "Time since it last spoke. At --engine-heartbeat-timeout-secs (10 s) it is killed and replaced.",
            (
                Query(
                    f"max by (instance, model) (sluice_engine_heartbeat_age_seconds{{{_OF}}})", "{{instance}} {{model}}"
                ),
            ),
            Unit.SECONDS,
            width=6,
            thresholds=warns(5, 10),
        ),
        Panel(
            "Recovery and missed deadlines",
            "How long the last recovery took, and requests in a second that ended at a deadline.",
            (
                Query(f"max by (model) (sluice_engine_last_recovery_seconds{{{_OF}}})", "{{model}} recovery, s"),
                Query(_rate("sluice_engine_timeouts_total"), "{{model}} deadlines, per s"),
            ),
            Unit.SHORT,
            width=6,
        ),
        Panel(
            "Gateway: processor and files",
            "Cores that the gateway's own process uses, and the share of its file descriptors that are open.",
            (
                Query(f'rate(process_cpu_seconds_total{{job="sluice", {_HERE}}}[{_RATE}])', "{{instance}} cores"),
                Query(
                    f'process_open_fds{{job="sluice", {_HERE}}} / process_max_fds{{job="sluice", {_HERE}}}',
                    "{{instance}} files",
                ),
            ),
            Unit.SHORT,
            width=6,
        ),
        Panel(
            "Gateway: memory",
            "Resident memory of the gateway's own process; engines have their own.",
            (Query(f'process_resident_memory_bytes{{job="sluice", {_HERE}}}', "{{instance}}"),),
            Unit.BYTES,
            width=12,
        ),
        Panel(
            "Machine",
            "Share of all processors that is busy, and of the memory that is used.",
            (
                Query(f"nv_cpu_utilization{{{_HERE}}}", "{{instance}} processors"),
                Query(
                    f"nv_cpu_memory_used_bytes{{{_HERE}}} / nv_cpu_memory_total_bytes{{{_HERE}}}", "{{instance}} memory"
                ),
            ),
            Unit.SHARE,
            width=12,
            thresholds=warns(0.9, 0.95),
            max=1,
        ),
    ),
)

TOKENS = Dashboard(
    "sluice-tokens",
    "Sluice: tokens",
    "Throughput and latency of language models, and what bounds them.",
    (Variable("instance", 'up{job="sluice"}', "instance"), Variable("model", "sluice_sequences_running", "model")),
    (_NOW, _THROUGHPUT, _LATENCY, _QUEUE, _KV, _STEPS, _ENGINE),
)
