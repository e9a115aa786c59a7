"""What only compiled engines have, and the transfer of KV blocks between servers."""

from engine.delegated.tensorrt_llm.configuration.parsing import boolean, count, one_of, positive, text
from engine.delegated.tensorrt_llm.configuration.setting import Setting

_KNOBS = "extended_runtime_perf_knob_config"
_QUANT = "quant_config"
_TRANSFER = "cache_transceiver_config"

ENGINES = (
    Setting(
        "multi_block_mode",
        f"{_KNOBS}.multi_block_mode",
        boolean,
        "Several blocks of threads for one sequence's attention.",
        engines_only=True,
    ),
    Setting(
        "enable_context_fmha_fp32_acc",
        f"{_KNOBS}.enable_context_fmha_fp32_acc",
        boolean,
        "Attention of the prompt sums in 32 bits.",
        engines_only=True,
    ),
    Setting("cuda_graph_mode", f"{_KNOBS}.cuda_graph_mode", boolean, "Decode in CUDA graphs.", engines_only=True),
    Setting(
        "cuda_graph_cache_size", f"{_KNOBS}.cuda_graph_cache_size", count, "Graphs that are kept.", engines_only=True
    ),
    Setting(
        "normalize_log_probs",
        "normalize_log_probs",
        boolean,
        "Log probabilities of beams by their lengths.",
        engines_only=True,
    ),
    Setting(
        "fail_fast_on_attention_window_too_large",
        "fail_fast_on_attention_window_too_large",
        boolean,
        "Fail at load where the cache cannot hold one attention window.",
        until="1.3",
    ),
    Setting(
        "embedding_parallel_mode",
        "embedding_parallel_mode",
        one_of("NONE", "SHARDING_ALONG_VOCAB", "SHARDING_ALONG_HIDDEN"),
        "How GPUs share the embedding when an engine is compiled at load.",
        engines_only=True,
    ),
    Setting("fast_build", "fast_build", boolean, "Compile faster, run slower.", engines_only=True),
    Setting("enable_build_cache", "enable_build_cache", boolean, "Keep compiled engines.", engines_only=True),
    Setting("workspace", "workspace", text, "Folder of files made while compiling.", engines_only=True),
    Setting(
        "quant_algo",
        f"{_QUANT}.quant_algo",
        str.upper,
        "Quantisation when an engine is compiled at load, as FP8 or W4A16_AWQ.",
        engines_only=True,
    ),
    Setting(
        "kv_cache_quant_algo",
        f"{_QUANT}.kv_cache_quant_algo",
        str.upper,
        "That of its KV cache, as FP8 or INT8.",
        engines_only=True,
    ),
    Setting("quant_group_size", f"{_QUANT}.group_size", positive, "Weights that have one scale.", engines_only=True),
)

TRANSFER = (
    Setting(
        "cache_transceiver_backend",
        f"{_TRANSFER}.backend",
        one_of("DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"),
        "What moves KV blocks between servers.",
    ),
    Setting(
        "cache_transceiver_runtime",
        f"{_TRANSFER}.transceiver_runtime",
        one_of("CPP", "PYTHON"),
        "Which implementation of it.",
        since="1.3",
    ),
    Setting(
        "cache_transceiver_max_tokens_in_buffer",
        f"{_TRANSFER}.max_tokens_in_buffer",
        positive,
        "Tokens that its buffer holds.",
    ),
    Setting("kv_transfer_timeout_ms", f"{_TRANSFER}.kv_transfer_timeout_ms", positive, "Longest transfer."),
    Setting(
        "kv_transfer_sender_future_timeout_ms",
        f"{_TRANSFER}.kv_transfer_sender_future_timeout_ms",
        positive,
        "Longest wait of the sender while nothing runs.",
    ),
)
