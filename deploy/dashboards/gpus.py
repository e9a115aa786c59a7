"""GPUs by NVML, and what TensorRT-LLM says of itself."""

from deploy.dashboards.panels import Dashboard, Draw, Panel, Query, Row, Unit, Variable, warns

_HERE = 'instance=~"$instance"'
_RATE = "$__rate_interval"
_GPU = "{{instance}} {{gpu_uuid}}"

_GPUS = Row(
    "GPUs",
    (
        Panel(
            "Utilisation",
            "Share of time in which a kernel ran. 70 to 90 % is right under load: more leaves nothing for peaks, less "
            "is paid for and not used.",
            (Query(f"nv_gpu_utilization{{{_HERE}}}", _GPU),),
            Unit.SHARE,
            thresholds=warns(0.9, 0.97),
            max=1,
        ),
        Panel(
            "Memory",
            "Used, and all there is. TensorRT-LLM takes its share for KV blocks at the start, used or not.",
            (
                Query(f"nv_gpu_memory_used_bytes{{{_HERE}}}", f"{_GPU} used"),
                Query(f"nv_gpu_memory_total_bytes{{{_HERE}}}", f"{_GPU} total"),
            ),
            Unit.BYTES,
        ),
        Panel(
            "Memory used",
            "Share of each GPU's memory. Above 97 % the next large batch may not fit.",
            (Query(f"nv_gpu_memory_used_bytes{{{_HERE}}} / nv_gpu_memory_total_bytes{{{_HERE}}}", _GPU),),
            Unit.SHARE,
            thresholds=warns(0.9, 0.97),
            max=1,
        ),
        Panel(
            "Power",
            "Drawn, and the limit at which clocks are lowered.",
            (
                Query(f"nv_gpu_power_usage{{{_HERE}}}", f"{_GPU} drawn"),
                Query(f"nv_gpu_power_limit{{{_HERE}}}", f"{_GPU} limit"),
            ),
            Unit.WATTS,
        ),
        Panel(
            "Energy of a token",
            "Joules that all GPUs of a server take for a generated token.",
            (
                Query(
                    f"sum by (instance) (rate(nv_energy_consumption{{{_HERE}}}[{_RATE}])) "
                    f"/ (sum by (instance) (rate(sluice_generation_tokens_total{{{_HERE}}}[{_RATE}])) > 0)"
                ),
            ),
            Unit.JOULES,
        ),
        Panel(
            "Energy",
            "Joules since the server started.",
            (Query(f"nv_energy_consumption{{{_HERE}}}", _GPU),),
            Unit.JOULES,
        ),
    ),
)

_PROCESSES = Row(
    "Models on GPUs",
    (
        Panel(
            "GPUs there are",
            "Their names, and the version of their driver.",
            (Query(f"sluice_gpu_info{{{_HERE}}}", "{{index}}: {{name}}, driver {{driver_version}}"),),
            Unit.COUNT,
            Draw.NAMES,
            width=12,
        ),
        Panel(
            "Memory by model",
            "What the processes of each model's engine hold. In a container the driver may hide whose memory is whose.",
            (
                Query(
                    f"sum by (instance, gpu_uuid, model) (sluice_gpu_process_memory_bytes{{{_HERE}}})",
                    "{{instance}} {{gpu_uuid}} {{model}}",
                ),
            ),
            Unit.BYTES,
            Draw.STACKED,
            width=12,
        ),
    ),
)
_ITERATIONS = Row(
    "Iterations, by the names of Triton's TensorRT-LLM backend",
    (
        Panel(
            "Requests of an iteration",
            "active: in the engine. scheduled: in the last iteration. context: in prefill. max: the bound.",
            (
                Query(
                    f"sum by (model, request_type) (nv_trt_llm_request_metrics{{{_HERE}}})",
                    "{{model}} {{request_type}}",
                ),
            ),
            Unit.COUNT,
        ),
        Panel(
            "KV blocks",
            "By TensorRT-LLM's count, where it runs the model; reused: found in the cache.",
            (
                Query(
                    "sum by (model, kv_cache_block_type) "
                    f'(nv_trt_llm_kv_cache_block_metrics{{{_HERE}, kv_cache_block_type=~"max|free|used|reused"}})',
                    "{{model}} {{kv_cache_block_type}}",
                ),
            ),
            Unit.SHORT,
        ),
        Panel(
            "Batch of an iteration",
            "Prompt tokens, sequences in decode, and paused ones.",
            (
                Query(
                    "sum by (model, inflight_batcher_specific_metric) (nv_trt_llm_inflight_batcher_metrics"
                    f'{{{_HERE}, inflight_batcher_specific_metric!="micro_batch_id"}})',
                    "{{model}} {{inflight_batcher_specific_metric}}",
                ),
            ),
            Unit.SHORT,
        ),
        Panel(
            "Iterations in a second",
            "How fast the counter of iterations goes up.",
            (
                Query(
                    "sum by (model) (deriv(nv_trt_llm_general_metrics"
                    f'{{{_HERE}, general_type="iteration_counter"}}[{_RATE}]))',
                    "{{model}}",
                ),
            ),
            Unit.OPERATIONS,
            width=12,
        ),
        Panel(
            "Memory of the runtime",
            "What TensorRT-LLM says that it uses of the GPU, of the machine, and of pinned memory. Nothing from other "
            "runtimes.",
            (
                Query(
                    f"sum by (model, memory_type) (nv_trt_llm_runtime_memory_metrics{{{_HERE}}})",
                    "{{model}} {{memory_type}}",
                ),
            ),
            Unit.BYTES,
            width=12,
        ),
    ),
)

GPUS = Dashboard(
    "sluice-gpus",
    "Sluice: GPUs and iterations",
    "GPUs by NVML, and the batches of language models. The upper half is empty on a machine without GPUs.",
    (Variable("instance", 'up{job="sluice"}', "instance"),),
    (_GPUS, _PROCESSES, _ITERATIONS),
)
