"""LoRA: LoraConfig, and PeftCacheConfig with tensorrtllm_backend's names for it."""

from engine.delegated.tensorrt_llm.configuration.parsing import (
    count,
    list_of,
    one_of,
    positive,
    share,
    size_bytes,
    text,
)
from engine.delegated.tensorrt_llm.configuration.setting import Setting

_LORA = "lora_config"
_CACHE = "peft_cache_config"

ADAPTERS = (
    Setting(
        "lora_dir",
        "",
        list_of(text),
        "Folders of adapters, or folders of such folders, whose names are then the adapters'.",
    ),
    Setting(
        "max_lora_rank",
        f"{_LORA}.max_lora_rank",
        positive,
        "Largest rank of an adapter. Default: what the given ones have.",
    ),
    Setting("max_loras", f"{_LORA}.max_loras", positive, "Adapters on the GPU at once."),
    Setting("max_cpu_loras", f"{_LORA}.max_cpu_loras", positive, "Adapters in host memory at once."),
    Setting(
        "lora_target_modules",
        f"{_LORA}.lora_target_modules",
        list_of(text),
        "Modules that adapters change, by TensorRT-LLM's names. Default: those of the given ones.",
    ),
    Setting("lora_ckpt_source", f"{_LORA}.lora_ckpt_source", one_of("hf", "nemo"), "Who wrote the adapters."),
    Setting(
        "lora_cache_optimal_adapter_size",
        f"{_CACHE}.optimal_adapter_size",
        positive,
        "Rank that the pages of the adapters' cache are made for.",
    ),
    Setting("lora_cache_max_adapter_size", f"{_CACHE}.max_adapter_size", positive, "Largest rank in the cache."),
    Setting(
        "lora_cache_gpu_memory_fraction",
        f"{_CACHE}.device_cache_percent",
        share,
        "Share of the free GPU memory for the cache.",
    ),
    Setting("lora_cache_host_memory_bytes", f"{_CACHE}.host_cache_size", size_bytes, "Host memory of the cache."),
    Setting(
        "lora_cache_num_host_module_layers",
        f"{_CACHE}.num_host_module_layer",
        count,
        "The same in layers of modules, over the bytes.",
    ),
    Setting(
        "lora_cache_num_device_module_layers",
        f"{_CACHE}.num_device_module_layer",
        count,
        "The same for the GPU, over the share.",
    ),
    Setting("lora_cache_num_put_workers", f"{_CACHE}.num_put_workers", positive, "Threads that fill the host's part."),
    Setting("lora_cache_num_ensure_workers", f"{_CACHE}.num_ensure_workers", positive, "Threads that fill the GPU's."),
    Setting("lora_cache_num_copy_streams", f"{_CACHE}.num_copy_streams", positive, "CUDA streams that copy."),
    Setting(
        "lora_cache_max_pages_per_block_host", f"{_CACHE}.max_pages_per_block_host", positive, "Pages of a host block."
    ),
    Setting(
        "lora_cache_max_pages_per_block_device",
        f"{_CACHE}.max_pages_per_block_device",
        positive,
        "Pages of a GPU block.",
    ),
)
