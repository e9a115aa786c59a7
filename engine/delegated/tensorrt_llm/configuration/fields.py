"""What becomes of each field of EngineConfig: the other half of the table in docs/tensorrt-llm.md."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.delegated.tensorrt_llm.configuration.settings import SETTINGS
from engine.delegated.tensorrt_llm.configuration.wishes import Strength, Wishes
from sluice.errors import invalid

_CACHE = "kv_cache_config"


@dataclass(frozen=True, slots=True)
class Field:
    """One field of EngineConfig. Without a target the adapter or what is around it uses it, as the note says."""

    name: str
    target: str = ""
    note: str = ""
    convert: Callable[[Any], Any] = lambda value: value


def _word(setting: str) -> Callable[[str], Any]:
    """Read as the setting of the same meaning reads it."""

    def convert(text: str) -> Any:
        try:
            return SETTINGS[setting].parse(text)
        except ValueError as error:
            raise invalid(setting, f"{setting} must be {error} with TensorRT-LLM, got {text!r}") from None

    return convert


FIELDS = (
    Field("model_path", "model"),
    Field("dtype", "dtype", "bf16 is bfloat16, f32 is float32", _word("dtype")),
    Field("max_model_len", "max_seq_len", "and max_input_len. Default: what the model was made for"),
    Field("num_blocks", f"{_CACHE}.max_tokens", "times tokens_per_block"),
    Field("kv_cache_memory_bytes", f"{_CACHE}.max_gpu_total_bytes"),
    Field("kv_cache_memory_fraction", f"{_CACHE}.free_gpu_memory_fraction", "default 0.9"),
    Field("kv_cache_dtype", f"{_CACHE}.dtype", "auto, fp8 or nvfp4; auto for engines", _word("kv_cache_dtype")),
    Field("quantization", "quant_config.quant_algo", "for engines compiled at load; else it must be the checkpoint's"),
    Field("cache_path", "", "only our own runtime has it"),
    Field("max_num_seqs", "max_batch_size"),
    Field("max_num_batched_tokens", "max_num_tokens"),
    Field("max_queued_requests", "", "requests wait in front of TensorRT-LLM, as with our own runtime"),
    Field("max_queued_tokens", "", "likewise"),
    Field(
        "scheduler_policy",
        "scheduler_config.capacity_scheduler_policy",
        "",
        lambda policy: str(policy.value).upper(),
    ),
    Field("enable_prefix_caching", f"{_CACHE}.enable_block_reuse"),
    Field("tenant_weights", "", "fair shares are made in front of TensorRT-LLM"),
    Field("speculation", "speculative_config", "ngram: NGramDecodingConfig; draft_model: DraftTargetDecodingConfig"),
    Field("num_speculative_tokens", "speculative_config.max_draft_len"),
    Field("draft_model_path", "speculative_config.speculative_model", "speculative_model_dir in 1.2"),
    Field("num_threads", "", "only our own runtime has it"),
    Field("runtime", "", "chose this one"),
    Field("tensor_parallel_size", "tensor_parallel_size"),
    Field("pipeline_parallel_size", "pipeline_parallel_size"),
    Field("lora_modules", "lora_config", "with lora_dir"),
    Field("tokenizer_path", "tokenizer", "only with guided decoding; else skip_tokenizer_init"),
    Field("engine_python", "", "Python that runs the engine's process"),
    Field("launcher", "", "command that the engine's process is started by"),
    Field("runtime_settings", "", "the settings below"),
    Field("llm_arguments", "", "arguments of the LLM class as they are, over all else"),
)
"""Every field of EngineConfig."""

_APART = frozenset({"model_path", "quantization", "speculation", "num_speculative_tokens", "draft_model_path"}) | {
    "lora_modules",
    "num_blocks",
}
"""Fields that more than one value is made of, or that depend on others."""

_DEFAULTS = {
    each.name: each.default for each in msgspec.structs.fields(EngineConfig) if each.default is not msgspec.NODEFAULT
}


def add_fields(wishes: Wishes, config: EngineConfig) -> None:
    """Wishes of all fields that stand for one argument each. Those that hold their default give way to settings.

    Raises SluiceError INVALID, naming the field.
    """
    for field in FIELDS:
        value = getattr(config, field.name)
        if not field.target or field.name in _APART or value is None:
            continue
        strength = Strength.DEFAULT if value == _DEFAULTS.get(field.name) else Strength.ASKED
        wishes.add(field.target, field.convert(value), field.name, strength)


def without_effect(config: EngineConfig) -> list[str]:
    """A note on each field that only another runtime has and that holds something."""
    return [
        f"{name} has no effect: only our own runtime has it"
        for name in ("cache_path", "num_threads")
        if getattr(config, name) is not None
    ]


def add_cache_size(wishes: Wishes, config: EngineConfig, tokens_per_block: int) -> None:
    """`num_blocks` as tokens, once it is known how many a block has."""
    if config.num_blocks is not None:
        wishes.add(f"{_CACHE}.max_tokens", config.num_blocks * tokens_per_block, "num_blocks", Strength.ASKED)
