"""What bounds language models: queue, KV blocks, steps, and the machine."""

from deploy.dashboards.panels import Draw, Panel, Query, Row, Threshold, Unit, warns
from deploy.dashboards.queries import HERE, OF, RATE, rate, ratio, total

QUEUE = Row(
    "Queue",
    (
        Panel(
            "Running and waiting",
            "Sequences that run, requests that wait to be admitted, and the most that one step runs.",
            (
                Query(f"max by (model) (sluice_engine_max_num_seqs{{{OF}}})", "{{model}} most"),
                Query(total("sluice_sequences_running"), "{{model}} running"),
                Query(total("sluice_sequences_waiting"), "{{model}} waiting"),
            ),
            Unit.COUNT,
        ),
        Panel(
            "Prompt tokens that wait",
            "--max-queue-tokens bounds them.",
            (Query(total("sluice_tokens_waiting"), "{{model}}"),),
            Unit.SHORT,
        ),
        Panel(
            "Wait to be admitted",
            "Predicted for a request that came now; mean of those admitted; and by how much the predictions were off.",
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
            "Reserved (used included): what the running ones may come to need; admission is by this.",
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
            "Prompt tokens found in the cache",
            "Share of prompt tokens that were not computed, because a request before had the same beginning.",
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
            "Pauses for want of blocks",
            "Sequences that were paused, and tokens computed again for them. 0 unless the policy is max_utilization.",
            (
                Query(rate("sluice_engine_preemptions_total"), "{{model}} pauses"),
                Query(rate("sluice_engine_recomputed_tokens_total"), "{{model}} tokens again"),
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
            "Steps in a second",
            "Each is one plan and one forward pass of the whole batch.",
            (Query(rate("sluice_engine_steps_total"), "{{model}}"),),
            Unit.OPERATIONS,
            width=6,
        ),
        Panel(
            "Tokens of a step",
            "The batch: tokens sampled (with no speculation: sequences), and prompt tokens computed beside them.",
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
            "Time of a step",
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
            "Drafts that were accepted",
            "Share of speculation's draft tokens that the model agreed with. 0 where there is no speculation.",
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
    ),
)
ENGINE = Row(
    "Engine and server",
    (
        Panel(
            "Engines",
            "What runs each model.",
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
            "Time to load",
            "How long each engine took to load its model; a recovery after a crash takes as long.",
            (Query(f"max by (model) (sluice_engine_load_seconds{{{OF}}})", "{{model}}"),),
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
            "Silence of the engine",
            "Time since it last spoke. At --engine-heartbeat-timeout-secs (10 s) it is killed and replaced.",
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
            "How long the last recovery took, and requests in a second that ended at a deadline.",
            (
                Query(f"max by (model) (sluice_engine_last_recovery_seconds{{{OF}}})", "{{model}} recovery, s"),
                Query(rate("sluice_engine_timeouts_total"), "{{model}} deadlines, per s"),
            ),
            Unit.SHORT,
            width=6,
        ),
        Panel(
            "Gateway: processor and files",
            "Cores that the gateway's own process uses, and the share of its file descriptors that are open.",
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
            "Resident memory of the gateway's own process; engines have their own.",
            (Query(f'process_resident_memory_bytes{{job="sluice", {HERE}}}', "{{instance}}"),),
            Unit.BYTES,
            width=12,
        ),
        Panel(
            "Machine",
            "Share of all processors that is busy, and of the memory that is used.",
            (
                Query(f"nv_cpu_utilization{{{HERE}}}", "{{instance}} processors"),
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
