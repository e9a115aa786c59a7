"""Effects of an LLM's config.pbtxt parameters on torch: those on OpenVINO, which has the same executor, but for types
and devices."""

from sluice.engine.runners.torch.runtime import TORCH
from sluice.pipelines.llm.openvino_parameters import OPENVINO_RULES
from sluice.pipelines.llm.parameter_effects import (
    Effect,
    Rule,
    choice_field,
    ignored,
    integer_field,
    parse_bool,
    parse_dtype,
    setting_rule,
)

_BY_ITSELF = ignored("torch's runner sets up the GPU by itself")
_NO_OFFLOAD = ignored("all weights are on the device")


def _cache_dtype(text: str) -> Effect:
    if text.startswith("fp8"):
        return Effect(note="the KV cache has the type of the computation on torch")
    return choice_field("kv_cache_dtype", *TORCH.kv_cache_dtypes)(text)


def _quantization(text: str) -> Effect:
    return Effect(note="" if text == "none" else "weights are taken as the checkpoint has them")


def _eager(text: str) -> Effect:
    return Effect(settings={"graphs": "false"}) if parse_bool(text) else Effect()


_GRAPHS = setting_rule(TORCH.settings["graphs"])
TORCH_RULES: dict[str, Rule] = {
    **OPENVINO_RULES,
    # TensorRT-LLM: processes and devices
    "enable_trt_overlap": _BY_ITSELF,
    "gpu_device_ids": ignored("CUDA_VISIBLE_DEVICES chooses GPUs"),
    "gpu_weights_percent": _NO_OFFLOAD,
    "multi_block_mode": _BY_ITSELF,
    "enable_context_fmha_fp32_acc": _BY_ITSELF,
    "cuda_graph_mode": _GRAPHS,
    "cuda_graph_cache_size": _BY_ITSELF,
    "FORCE_CPU_ONLY_INPUT_TENSORS": _BY_ITSELF,
    # vLLM's engine arguments
    "tensor_parallel_size": integer_field("tensor_parallel_size", 1),
    "pipeline_parallel_size": integer_field("pipeline_parallel_size", 1),
    "distributed_executor_backend": ignored("torch's runner starts its ranks by itself"),
    "enforce_eager": _eager,
    "cpu_offload_gb": _NO_OFFLOAD,
    # this engine's own parameters
    "device": choice_field("device", *TORCH.device_names),
    "dtype": lambda text: Effect({"dtype": parse_dtype(text)}),
    "graphs": _GRAPHS,
    "quantization": _quantization,
    "kv_cache_dtype": _cache_dtype,
}
"""Rules by parameter."""
