"""The dashboard of GPUs: NVML's metrics, and the iteration statistics of TensorRT-LLM."""

from deploy.dashboards.panels import Dashboard, Draw, Panel, Query, Row, Unit, Variable, warns
from deploy.dashboards.queries import HERE, RATE

_GPU = "{{instance}} {{gpu_uuid}}"

_GPUS = Row(
    "GPUs",
    (
        Panel(
            "Utilization",
            "Share of the time in which a kernel ran. 70 to 90 % is right under load: more leaves no room for "
            "peaks, less is idle hardware.",
            (Query(f"nv_gpu_utilization{{{HERE}}}", _GPU),),
            Unit.SHARE,
            thresholds=warns(0.9, 0.97),
            max=1,
        ),
        Panel(
            "Memory",
            "Used and total memory. TensorRT-LLM allocates its share for KV blocks at the start, used or not.",
            (
                Query(f"nv_gpu_memory_used_bytes{{{HERE}}}", f"{_GPU} used"),
                Query(f"nv_gpu_memory_total_bytes{{{HERE}}}", f"{_GPU} total"),
            ),
            Unit.BYTES,
        ),
        Panel(
            "Memory used",
            "Share of each GPU's memory. Above 97 % the next large batch may not fit.",
            (Query(f"nv_gpu_memory_used_bytes{{{HERE}}} / nv_gpu_memory_total_bytes{{{HERE}}}", _GPU),),
            Unit.SHARE,
            thresholds=warns(0.9, 0.97),
            max=1,
        ),
        Panel(
            "Power",
            "Power drawn, and the limit at which clocks are lowered.",
            (
                Query(f"nv_gpu_power_usage{{{HERE}}}", f"{_GPU} drawn"),
                Query(f"nv_gpu_power_limit{{{HERE}}}", f"{_GPU} limit"),
            ),
            Unit.WATTS,
        ),
        Panel(
            "Energy per token",
            "Joules that all GPUs of a server use per generated token.",
            (
                Query(
                    f"sum by (instance) (rate(nv_energy_consumption{{{HERE}}}[{RATE}])) "
                    f"/ (sum by (instance) (rate(sluice_generation_tokens_total{{{HERE}}}[{RATE}])) > 0)"
                ),
            ),
            Unit.JOULES,
        ),
        Panel(
            "Energy",
            "Joules since the server started.",
            (Query(f"nv_energy_consumption{{{HERE}}}", _GPU),),
            Unit.JOULES,
        ),
    ),
)

_PROCESSES = Row(
    "Models on GPUs",
    (
        Panel(
            "Installed GPUs",
            "Names of the GPUs, and the version of the driver.",
            (Query(f"sluice_gpu_info{{{HERE}}}", "{{index}}: {{name}}, driver {{driver_version}}"),),
            Unit.COUNT,
            Draw.NAMES,
            width=12,
        ),
        Panel(
            "Memory by model",
            "Memory of the processes of each model's engine. In a container the driver may hide the processes.",
            (
                Query(
                    f"sum by (instance, gpu_uuid, model) (sluice_gpu_process_memory_bytes{{{HERE}}})",
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
            "Requests per iteration",
            "active: in the engine. scheduled: in the last iteration. context: in prefill. max: the limit.",
            (
                Query(
                    f"sum by (model, request_type) (nv_trt_llm_request_metrics{{{HERE}}})",
                    "{{model}} {{request_type}}",
                ),
            ),
            Unit.COUNT,
        ),
        Panel(
            "KV blocks",
            "TensorRT-LLM's count of its blocks. reused: found in the prefix cache.",
            (
                Query(
                    "sum by (model, kv_cache_block_type) "
                    f'(nv_trt_llm_kv_cache_block_metrics{{{HERE}, kv_cache_block_type=~"max|free|used|reused"}})',
                    "{{model}} {{kv_cache_block_type}}",
                ),
            ),
            Unit.SHORT,
        ),
        Panel(
            "Batch per iteration",
            "Prompt tokens, sequences in decode, and paused sequences.",
            (
                Query(
                    "sum by (model, inflight_batcher_specific_metric) (nv_trt_llm_inflight_batcher_metrics"
                    f'{{{HERE}, inflight_batcher_specific_metric!="micro_batch_id"}})',
                    "{{model}} {{inflight_batcher_specific_metric}}",
                ),
            ),
            Unit.SHORT,
        ),
        Panel(
            "Iterations per second",
            "Rate of the iteration counter.",
            (
                Query(
                    "sum by (model) (deriv(nv_trt_llm_general_metrics"
                    f'{{{HERE}, general_type="iteration_counter"}}[{RATE}]))',
                    "{{model}}",
                ),
            ),
            Unit.OPERATIONS,
            width=12,
        ),
        Panel(
            "Memory of the runtime",
            "GPU, host and pinned memory that TensorRT-LLM reports for itself. Other runtimes report none.",
            (
                Query(
                    f"sum by (model, memory_type) (nv_trt_llm_runtime_memory_metrics{{{HERE}}})",
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
