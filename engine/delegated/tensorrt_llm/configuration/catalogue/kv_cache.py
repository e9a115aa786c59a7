"""KvCacheConfig: how large the KV cache is, what is reused and what goes to the host."""

from engine.delegated.tensorrt_llm.configuration.parsing import (
    boolean,
    count,
    list_of,
    number,
    one_of,
    positive,
    share,
    size_bytes,
)
from engine.delegated.tensorrt_llm.configuration.setting import Setting

_CACHE = "kv_cache_config"

KV_CACHE = (
    Setting(
        "free_gpu_memory_fraction",
        f"{_CACHE}.free_gpu_memory_fraction",
        share,
        "Share of the GPU memory that is free once the model is loaded; with other limits the smallest wins.",
        ("kv_cache_free_gpu_memory_fraction", "kv_cache_free_gpu_mem_fraction", "kv_cache_memory_fraction"),
    ),
    Setting(
        "kv_cache_max_tokens",
        f"{_CACHE}.max_tokens",
        positive,
        "Most tokens that the cache holds.",
        ("max_tokens_in_paged_kv_cache",),
    ),
    Setting(
        "max_gpu_total_bytes",
        f"{_CACHE}.max_gpu_total_bytes",
        size_bytes,
        "Most GPU memory of the cache.",
        ("kv_cache_memory_bytes",),
    ),
    Setting("tokens_per_block", f"{_CACHE}.tokens_per_block", positive, "Tokens in a block.", ("block_size",)),
    Setting(
        "kv_cache_dtype",
        f"{_CACHE}.dtype",
        one_of("auto", "fp8", "nvfp4"),
        "Type of cached keys and values; auto is what the checkpoint says.",
        pytorch_only=True,
    ),
    Setting(
        "mamba_ssm_cache_dtype",
        f"{_CACHE}.mamba_ssm_cache_dtype",
        one_of("auto", "float16", "bfloat16", "float32"),
        "Type of the state of Mamba layers.",
        pytorch_only=True,
    ),
    Setting(
        "enable_block_reuse",
        f"{_CACHE}.enable_block_reuse",
        boolean,
        "Keep blocks of finished requests for others that begin alike.",
        ("enable_kv_cache_reuse", "enable_prefix_caching"),
    ),
    Setting(
        "enable_partial_reuse", f"{_CACHE}.enable_partial_reuse", boolean, "Reuse a block of which only a part fits."
    ),
    Setting(
        "copy_on_partial_reuse",
        f"{_CACHE}.copy_on_partial_reuse",
        boolean,
        "Copy such a block where another request uses it.",
    ),
    Setting(
        "host_cache_size",
        f"{_CACHE}.host_cache_size",
        size_bytes,
        "Host memory that blocks are offloaded to.",
        ("kv_cache_host_memory_bytes",),
    ),
    Setting(
        "onboard_blocks",
        f"{_CACHE}.onboard_blocks",
        boolean,
        "Copy offloaded blocks back before they are used.",
        ("kv_cache_onboard_blocks",),
    ),
    Setting(
        "secondary_offload_min_priority",
        f"{_CACHE}.secondary_offload_min_priority",
        count,
        "Only blocks of a higher priority, 0 to 100, are offloaded.",
    ),
    Setting(
        "max_attention_window",
        f"{_CACHE}.max_attention_window",
        list_of(positive),
        "Attention windows in tokens, repeated over the layers.",
        ("max_attention_window_size",),
    ),
    Setting(
        "sink_token_length",
        f"{_CACHE}.sink_token_length",
        count,
        "First tokens that stay inside of every attention window.",
    ),
    Setting(
        "cross_kv_cache_fraction",
        f"{_CACHE}.cross_kv_cache_fraction",
        share,
        "Share of the cache for cross attention, of encoder-decoder models.",
    ),
    Setting(
        "event_buffer_max_size",
        f"{_CACHE}.event_buffer_max_size",
        count,
        "KV-cache events that are kept until they are read; 0 is none.",
    ),
    Setting(
        "attention_dp_events_gather_period_ms",
        f"{_CACHE}.attention_dp_events_gather_period_ms",
        positive,
        "How often events are gathered from the ranks of attention data parallelism.",
    ),
    Setting("use_uvm", f"{_CACHE}.use_uvm", boolean, "Cache in unified virtual memory."),
    Setting(
        "use_kv_cache_manager_v2",
        f"{_CACHE}.use_kv_cache_manager_v2",
        boolean,
        "The experimental second cache manager.",
        since="1.3",
    ),
    Setting(
        "max_util_for_resume",
        f"{_CACHE}.max_util_for_resume",
        number(0.0, 1.0),
        "Cache use up to which the second manager resumes paused requests.",
        since="1.3",
    ),
)
