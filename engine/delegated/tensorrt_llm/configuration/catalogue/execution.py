"""How the model is loaded and computed: weights, kernels, CUDA graphs, torch.compile, experts, sampling."""

from typing import Any

from engine.delegated.tensorrt_llm.configuration.parsing import (
    boolean,
    count,
    json_object,
    list_of,
    none_or,
    one_of,
    positive,
    text,
)
from engine.delegated.tensorrt_llm.configuration.setting import Setting

_GRAPHS = "cuda_graph_config"
_COMPILE = "torch_compile_config"
_MOE = "moe_config"

GUIDED_DECODING_BACKEND = "guided_decoding_backend"


def _on_or_off(value: str) -> dict[str, Any] | None:
    """None switches a sub-configuration off; an empty one has its defaults."""
    return {} if boolean(value) else None


def _off_or_on(value: str) -> dict[str, Any] | None:
    return None if boolean(value) else {}


EXECUTION = (
    Setting(
        "dtype",
        "dtype",
        one_of("auto", "bfloat16", "float16", "float32", bf16="bfloat16", f16="float16", f32="float32"),
        "Type of computation; auto is what the checkpoint says.",
    ),
    Setting("load_format", "load_format", one_of("auto", "dummy", "vision_only"), "dummy: weights at random."),
    Setting("checkpoint_format", "checkpoint_format", text, "Format of the checkpoint's files.", pytorch_only=True),
    Setting("trust_remote_code", "trust_remote_code", boolean, "Run code that comes with the checkpoint."),
    Setting("model_kwargs", "model_kwargs", json_object, "Values over those of config.json.", since="1.3"),
    Setting("tokenizer_dir", "tokenizer", text, "Folder of the tokenizer, for guided decoding.", ("tokenizer",)),
    Setting("tokenizer_mode", "tokenizer_mode", one_of("auto", "slow"), "Which implementation of the tokenizer."),
    Setting("custom_tokenizer", "custom_tokenizer", text, "Class of the tokenizer, or a name for it.", since="1.3"),
    Setting(
        "backend",
        "backend",
        one_of("pytorch", "tensorrt"),
        "tensorrt (before 1.3) compiles an engine of a HuggingFace checkpoint at load.",
    ),
    Setting(
        GUIDED_DECODING_BACKEND,
        GUIDED_DECODING_BACKEND,
        none_or(one_of("xgrammar", "llguidance"), "none"),
        "What makes outputs match a grammar, or none. Default: xgrammar where there are a tokenizer.json, no "
        "speculation and no compiled engine.",
    ),
    Setting(
        "attn_backend", "attn_backend", text, "Kernels of attention: TRTLLM, FLASHINFER, VANILLA.", pytorch_only=True
    ),
    Setting(
        "sampler_type",
        "sampler_type",
        one_of("auto", "TorchSampler", "TRTLLMSampler"),
        "The sampler. Before 1.3 only TRTLLMSampler has penalties.",
        pytorch_only=True,
    ),
    Setting(
        "sampler_force_async_worker",
        "sampler_force_async_worker",
        boolean,
        "Copy sampled tokens in a thread of its own.",
        since="1.3",
        pytorch_only=True,
    ),
    Setting(
        "disable_flashinfer_sampling",
        "disable_flashinfer_sampling",
        boolean,
        "Sample without FlashInfer's kernels.",
        since="1.3",
        pytorch_only=True,
    ),
    Setting(
        "cuda_graphs", _GRAPHS, _on_or_off, "false: decode without CUDA graphs.", ("use_cuda_graph",), pytorch_only=True
    ),
    Setting("enforce_eager", _GRAPHS, _off_or_on, "The same, said the other way round.", pytorch_only=True),
    Setting(
        "cuda_graph_batch_sizes",
        f"{_GRAPHS}.batch_sizes",
        list_of(positive),
        "Batch sizes that graphs are made for.",
        pytorch_only=True,
    ),
    Setting(
        "cuda_graph_max_batch_size",
        f"{_GRAPHS}.max_batch_size",
        count,
        "Largest of them, where they are not listed.",
        pytorch_only=True,
    ),
    Setting(
        "cuda_graph_enable_padding",
        f"{_GRAPHS}.enable_padding",
        boolean,
        "Run a batch in the next larger graph.",
        pytorch_only=True,
    ),
    Setting("torch_compile", _COMPILE, _on_or_off, "true: compile the model with torch.compile.", pytorch_only=True),
    Setting(
        "torch_compile_enable_fullgraph",
        f"{_COMPILE}.enable_fullgraph",
        boolean,
        "As one graph.",
        pytorch_only=True,
    ),
    Setting(
        "torch_compile_enable_inductor",
        f"{_COMPILE}.enable_inductor",
        boolean,
        "By Inductor.",
        pytorch_only=True,
    ),
    Setting(
        "torch_compile_enable_piecewise_cuda_graph",
        f"{_COMPILE}.enable_piecewise_cuda_graph",
        boolean,
        "With CUDA graphs of parts.",
        pytorch_only=True,
    ),
    Setting(
        "torch_compile_capture_num_tokens",
        f"{_COMPILE}.capture_num_tokens",
        list_of(positive),
        "Token counts that these are made for.",
        pytorch_only=True,
    ),
    Setting(
        "torch_compile_enable_userbuffers",
        f"{_COMPILE}.enable_userbuffers",
        boolean,
        "With buffers that GPUs share.",
        pytorch_only=True,
    ),
    Setting(
        "torch_compile_max_num_streams",
        f"{_COMPILE}.max_num_streams",
        positive,
        "Most CUDA streams.",
        pytorch_only=True,
    ),
    Setting("enable_autotuner", "enable_autotuner", boolean, "Choose the fastest kernels at load.", pytorch_only=True),
    Setting("enable_min_latency", "enable_min_latency", boolean, "Kernels for small batches.", pytorch_only=True),
    Setting(
        "moe_backend",
        f"{_MOE}.backend",
        one_of("CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"),
        "Kernels of the experts.",
        pytorch_only=True,
    ),
    Setting(
        "moe_max_num_tokens", f"{_MOE}.max_num_tokens", positive, "Most tokens in one call of them.", pytorch_only=True
    ),
    Setting("moe_load_balancer", f"{_MOE}.load_balancer", text, "File that spreads the experts.", pytorch_only=True),
    Setting(
        "moe_disable_finalize_fusion",
        f"{_MOE}.disable_finalize_fusion",
        boolean,
        "Sum the experts' outputs in a fixed order.",
        pytorch_only=True,
    ),
    Setting(
        "moe_use_low_precision_combine",
        f"{_MOE}.use_low_precision_moe_combine",
        boolean,
        "Sum them in low precision.",
        pytorch_only=True,
    ),
    Setting(
        "force_dynamic_quantization",
        "force_dynamic_quantization",
        boolean,
        "Scale activations as they come, not by the checkpoint's scales.",
        pytorch_only=True,
    ),
    Setting(
        "use_cute_dsl_blockscaling_mm",
        "use_cute_dsl_blockscaling_mm",
        boolean,
        "CuTe kernels for FP8 with block scales.",
        since="1.3",
        pytorch_only=True,
    ),
    Setting(
        "use_cute_dsl_blockscaling_bmm",
        "use_cute_dsl_blockscaling_bmm",
        boolean,
        "The same for batches of matrices.",
        since="1.3",
        pytorch_only=True,
    ),
    Setting(
        "garbage_collection_gen0_threshold",
        "garbage_collection_gen0_threshold",
        positive,
        "Objects between two collections by Python.",
        pytorch_only=True,
    ),
)
