"""Effects of an LLM's config.pbtxt and model.json parameters on vLLM: its engine arguments by their own names."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from sluice.engine.config import EngineConfig, Task
from sluice.engine.delegated.vllm.settings import SETTINGS
from sluice.pipelines.llm.model_folder import parse_lora_modules
from sluice.pipelines.llm.parameter_effects import (
    SHARED_RULES,
    UNSET_CACHE_SIZE,
    CodeChoices,
    Effect,
    Rule,
    choice_field,
    guarded,
    handled_elsewhere,
    ignored,
    parse_dtype,
    parse_fraction,
    setting_rule,
)

_OWN_MEANING = frozenset({"gpu_memory_utilization", "seed"})
"""Arguments of vLLM that mean something else on every other runtime."""
_EXECUTORS = ("external_launcher", "mp", "ray", "uni")
"""vLLM's own ways to start workers. Any other word is a class."""
_CLASS_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
"""A class with its module, which vLLM takes in place of a draft model."""


def _is_other_executor(value: Any) -> bool:
    return bool(value) and value not in _EXECUTORS


def _is_class_path(value: Any) -> bool:
    return _CLASS_PATH.fullmatch(str(value)) is not None


VLLM_CODE: CodeChoices = {
    **dict.fromkeys(
        (
            "compilation_config.backend",
            "compilation_config.cache_dir",  # compiled code is loaded from it
            "compilation_config.inductor_compile_config",  # it names compilers
            "compilation_config.inductor_passes",
            "ec_manager_config",
            "ec_transfer_config",
            "io_processor_plugin",
            "kv_transfer_config",
            "logging_config",
            "model_class_overrides",
            "profiler_config",
            "scheduler_cls",
            "structured_outputs_config.reasoning_parser_plugin",
            "trust_remote_code",
            "worker_extension_cls",
        ),
        bool,
    ),
    "distributed_executor_backend": _is_other_executor,
    "spec_method": lambda value: value == "custom_class",
    "spec_model": _is_class_path,
    "speculative_config.method": lambda value: value == "custom_class",
    "speculative_config.model": _is_class_path,
    "worker_cls": lambda value: bool(value) and value != "auto",
}


def _cache_fraction(text: str) -> Effect:
    settings = {"gpu_memory_utilization": str(parse_fraction(text))}
    return Effect(UNSET_CACHE_SIZE, "vLLM takes it as a share of all memory, weights included", settings)


def _lora_modules(text: str) -> Effect:
    return Effect({"lora_modules": parse_lora_modules(text)})


_RULES: Mapping[str, Rule] = {
    **{name: rule for name, rule in SHARED_RULES.items() if name not in _OWN_MEANING},
    "kv_cache_free_gpu_mem_fraction": _cache_fraction,
    "lora_modules": _lora_modules,
    "dtype": lambda text: Effect({"dtype": parse_dtype(text)}),
    "enable_lora": handled_elsewhere,
    "num_threads": ignored("vLLM takes all cores of a CPU; the variable VLLM_CPU_OMP_THREADS_BIND chooses them"),
    "task": choice_field("task", *Task),
    "engine_launcher": ignored("vLLM starts its processes itself"),
}


def vllm_rules(engine: EngineConfig, texts: Mapping[str, str]) -> Callable[[str], Rule | None]:
    """Return a function that finds the rule of a parameter, None for an unknown one."""

    def find_rule(key: str) -> Rule | None:
        rule, setting = _RULES.get(key), SETTINGS.get(key)
        if rule is not None or setting is None:
            return rule
        return guarded(setting_rule(setting), key, setting.parse, VLLM_CODE)

    return find_rule
