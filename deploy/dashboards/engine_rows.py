"""Rows about the limits of language models: queue, KV blocks, steps, engine and machine."""

from deploy.dashboards.panels import Draw, Panel, Query, Row, Threshold, Unit, warns
from deploy.dashboards.queries import HERE, OF, RATE, quantile, rate, ratio, sizes, total

QUEUE = Row(
    "Queue",
    (
        Panel(
            "Running and waiting",
            "Running sequences, requests that wait for admission, and the most sequences of one step.",
            (
                Query(f"max by (model) (sluice_engine_max_num_seqs{{{OF}}})", "{{model}} most"),
                Query(total("sluice_sequences_running"), "{{model}} running"),
                Query(total("sluice_sequences_waiting"), "{{model}} waiting"),
            ),
            Unit.COUNT,
        ),
        Panel(
            "Waiting prompt tokens",
            "Prompt tokens of waiting requests. --max-queue-tokens limits them.",
            (Query(total("sluice_tokens_waiting"), "{{model}}"),),
            Unit.SHORT,
        ),
        Panel(
            "Wait for admission",
            "Predicted wait of a new request, mean wait of admitted ones, and mean error of the predictions.",
            (
                Query(f"max by (model) (sluice_predicted_wait_seconds{{{OF}}})", "{{model}} predicted"),
                Query(ratio("sluice_engine_wait_seconds_total", "sluice_engine_waits_total"), "{{model}} mean"),
                Query(
                    ratio("sluice_engine_wait_error_seconds_total", "sluice_engine_waits_total"),
                    "{{model}} mean error",
                ),
            ),
            Unit.SECONDS,
        ),
    ),
)
KV = Row(
    "KV cache",
    (
        Panel(
            "KV blocks",
            "Used: held by running sequences. Cached: free, with a prefix that a request could reuse. Free: neither. "
            "Reserved: all blocks that the running sequences may need, used ones included; admission counts these.",
            (
                Query(total("sluice_kv_blocks_used"), "{{model}} used"),
                Query(total("sluice_kv_blocks_cached"), "{{model}} cached"),
                Query(f"{total('sluice_kv_blocks_free')} - {total('sluice_kv_blocks_cached')}", "{{model}} free"),
                Query(total("sluice_kv_blocks_reserved"), "{{model}} reserved"),
            ),
            Unit.SHORT,
            width=12,
        ),
        Panel(
            "Prompt tokens from the prefix cache",
            "Share of prompt tokens that were not computed, since an earlier request had the same prefix.",
            (
                Query(
                    ratio(
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
            "Preemptions",
            "Preempted sequences, and tokens recomputed for them. 0 unless the policy is max_utilization.",
            (
                Query(rate("sluice_engine_preemptions_total"), "{{model}} preemptions"),
                Query(rate("sluice_engine_recomputed_tokens_total"), "{{model}} recomputed tokens"),
            ),
            Unit.OPERATIONS,
            width=6,
        ),
    ),
)
STEPS = Row(
    "Batches and steps",
    (
        Panel(
            "Steps per second",
            "A step is one plan and one forward pass of the whole batch.",
            (Query(rate("sluice_engine_steps_total"), "{{model}}"),),
            Unit.OPERATIONS,
            width=6,
        ),
        Panel(
            "Tokens per step",
            "Tokens sampled (without speculation: one for each sequence), and prompt tokens computed in the same step.",
            (
                Query(
                    ratio("sluice_engine_generation_tokens_total", "sluice_engine_steps_total"), "{{model}} generated"
                ),
                Query(ratio("sluice_engine_prompt_tokens_total", "sluice_engine_steps_total"), "{{model}} prompt"),
            ),
            Unit.SHORT,
            width=6,
        ),
        Panel(
            "Time per step",
            "runner: the model. overhead: planning, sampling and everything else.",
            (
                Query(
                    f"{rate('sluice_engine_seconds_total', 'model, part')} "
                    f"/ on (model) group_left () ({rate('sluice_engine_steps_total')} > 0)",
                    "{{model}} {{part}}",
                ),
            ),
            Unit.SECONDS,
            Draw.STACKED,
            width=6,
        ),
        Panel(
            "Accepted draft tokens",
            "Share of speculation's draft tokens that the model accepted. 0 without speculation.",
            (
                Query(
                    f"{rate('sluice_engine_accepted_tokens_total')} "
                    f"/ clamp_min({rate('sluice_engine_draft_tokens_total')}, 1e-9)",
                    "{{model}}",
                ),
            ),
            Unit.SHARE,
            width=6,
            max=1,
        ),
        Panel(
            "Distribution of step times",
            "Times of all steps. Two bands: steps that prefill a prompt take longer than those that only decode.",
            (Query(rate("sluice_engine_step_seconds_bucket", "le"), "{{le}}"),),
            Unit.SECONDS,
            Draw.HEATMAP,
            width=8,
        ),
        Panel(
            "Batch sizes",
            "Sequences in a step, and the tokens that it runs: median and 99th percentile.",
            (*sizes("sluice_engine_step_sequences", "sequences"), *sizes("sluice_engine_step_tokens", "tokens")),
            Unit.SHORT,
            width=8,
        ),
        Panel(
            "Queue and prefill",
            "Time from submission to admission, and from there to the first token: 99th percentiles.",
            (
                Query(quantile(0.99, "sluice_engine_queue_seconds"), "{{model}} queue"),
                Query(quantile(0.99, "sluice_engine_prefill_seconds"), "{{model}} prefill"),
            ),
            Unit.SECONDS,
            width=8,
        ),
    ),
)
ENGINE = Row(
    "Engine and server",
    (
        Panel(
            "Engines",
            "The runtime of each model.",
            (
                Query(
                    f"sluice_engine_info{{{OF}}}",
                    "{{model}}: {{runtime}} {{runtime_version}}, {{model_type}}, {{dtype}}, {{num_gpus}} GPUs",
                ),
            ),
            Unit.COUNT,
            Draw.NAMES,
            width=12,
        ),
        Panel(
            "Load time",
            "Seconds that each engine took to load its model. A recovery after a crash takes as long.",
            (Query(f"max by (model) (sluice_engine_load_seconds{{{OF}}})", "{{model}}"),),
            Unit.SECONDS,
            Draw.NUMBER,
            width=12,
            thresholds=(Threshold(5, "orange"),),
        ),
        Panel(
            "Engines replaced",
            "Engines that crashed or hung, requests that resumed in the next engine, and requests that failed "
            "because engines crashed on them.",
            (
                Query(f"sum by (model) (increase(sluice_engine_restarts_total{{{OF}}}[5m]))", "{{model}} restarts"),
                Query(
                    f"sum by (model) (increase(sluice_engine_resumed_requests_total{{{OF}}}[5m]))",
                    "{{model}} requests resumed",
                ),
                Query(
                    f"sum by (model) (increase(sluice_engine_poisoned_requests_total{{{OF}}}[5m]))",
                    "{{model}} requests failed",
                ),
            ),
            Unit.SHORT,
            width=6,
        ),
        Panel(
            "Age of the heartbeat",
            "Time since the engine's last frame. At --engine-heartbeat-timeout-secs (10 s) it is killed and replaced.",
            (
                Query(
                    f"max by (instance, model) (sluice_engine_heartbeat_age_seconds{{{OF}}})", "{{instance}} {{model}}"
                ),
            ),
            Unit.SECONDS,
            width=6,
            thresholds=warns(5, 10),
        ),
        Panel(
            "Recovery and missed deadlines",
            "Seconds of the last recovery, and requests per second that ended at a deadline.",
            (
                Query(f"max by (model) (sluice_engine_last_recovery_seconds{{{OF}}})", "{{model}} recovery, s"),
                Query(rate("sluice_engine_timeouts_total"), "{{model}} deadlines, per s"),
            ),
            Unit.SHORT,
            width=6,
        ),
        Panel(
            "Gateway: CPU and files",
            "CPU cores that the gateway's process uses, and the share of its file descriptors that are open.",
            (
                Query(f'rate(process_cpu_seconds_total{{job="sluice", {HERE}}}[{RATE}])', "{{instance}} cores"),
                Query(
                    f'process_open_fds{{job="sluice", {HERE}}} / process_max_fds{{job="sluice", {HERE}}}',
                    "{{instance}} files",
                ),
            ),
            Unit.SHORT,
            width=6,
        ),
        Panel(
            "Gateway: memory",
            "Resident memory of the gateway's process, without the engines.",
            (Query(f'process_resident_memory_bytes{{job="sluice", {HERE}}}', "{{instance}}"),),
            Unit.BYTES,
            width=12,
        ),
        Panel(
            "Machine",
            "Share of the machine's CPU time and memory in use.",
            (
                Query(f"nv_cpu_utilization{{{HERE}}}", "{{instance}} CPU"),
                Query(
                    f"nv_cpu_memory_used_bytes{{{HERE}}} / nv_cpu_memory_total_bytes{{{HERE}}}", "{{instance}} memory"
                ),
            ),
            Unit.SHARE,
            width=12,
            thresholds=warns(0.9, 0.95),
            max=1,
        ),
    ),
)
