"""Effects of an LLM's config.pbtxt and model.json parameters on vLLM: its engine arguments by their own names."""

from collections.abc import Callable, Mapping

from engine.config import EngineConfig, Task
from engine.delegated.vllm.settings import SETTINGS
from pipelines.llm.model_folder import parse_lora_modules
from pipelines.llm.parameter_effects import (
    SHARED_RULES,
    UNSET_CACHE_SIZE,
    Effect,
    Rule,
    choice_field,
    handled_elsewhere,
    ignored,
    ignored_unless,
    parse_dtype,
    parse_fraction,
    setting_rule,
)

_OWN_MEANING = frozenset({"gpu_memory_utilization", "seed"})
"""Arguments of vLLM that mean something else on every other runtime."""
_CHOOSE_CODE = (
    "ec_transfer_config",
    "io_processor_plugin",
    "kv_transfer_config",
    "logging_config",
    "model_class_overrides",
    "profiler_config",
    "scheduler_cls",
    "trust_remote_code",
    "worker_cls",
    "worker_extension_cls",
)
_FROM_COMMAND_LINE = ignored_unless(
    ("false", "", "auto"), "what chooses code to run is taken from the command line alone, by --runtime-setting"
)
"""Models may be uploaded by a request."""


def _cache_fraction(text: str) -> Effect:
    settings = {"gpu_memory_utilization": str(parse_fraction(text))}
    return Effect(UNSET_CACHE_SIZE, "vLLM takes it as a share of all memory, weights included", settings)


def _compilation_config(text: str) -> Effect:
    effect = setting_rule(SETTINGS["compilation_config"])(text)
    value = SETTINGS["compilation_config"].parse(text)
    return _FROM_COMMAND_LINE(text) if isinstance(value, dict) and "backend" in value else effect


def _lora_modules(text: str) -> Effect:
    return Effect({"lora_modules": parse_lora_modules(text)})


_RULES: Mapping[str, Rule] = {
    **{name: rule for name, rule in SHARED_RULES.items() if name not in _OWN_MEANING},
    "kv_cache_free_gpu_mem_fraction": _cache_fraction,
    "compilation_config": _compilation_config,
    "lora_modules": _lora_modules,
    **dict.fromkeys(_CHOOSE_CODE, _FROM_COMMAND_LINE),
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
        return rule if rule is not None or setting is None else setting_rule(setting)

    return find_rule
