"""Applies the parameters of an LLM's config.pbtxt over the options of the command line. The effect of each parameter
stands in `parameter_effects.py` where it is the same on every runtime. A runtime's own ones stand in a file of its
name, which `_RULE_FINDERS` registers. A runtime without one has the shared parameters, and its settings by name."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.engine.config import EngineConfig, Runtime
from sluice.engine.runtime_settings import full_names
from sluice.engine.runtimes import RUNTIMES
from sluice.errors import invalid
from sluice.pipelines.llm.executor_parameters import OPENVINO_RULES, TORCH_RULES
from sluice.pipelines.llm.parameter_effects import (
    FROM_COMMAND_LINE,
    SHARED_RULES,
    CodeChoices,
    Effect,
    Rule,
    chooses_code,
    parse_bool,
    setting_rule,
)
from sluice.pipelines.llm.tensorrt_llm_parameters import TENSORRT_LLM_CODE, tensorrt_llm_rules
from sluice.pipelines.llm.vllm_parameters import VLLM_CODE, vllm_rules

_TEMPLATE = re.compile(r"\$\{\w*\}")

_PRECEDENCE = {
    ("max_tokens_in_paged_kv_cache", "kv_cache_free_gpu_mem_fraction"),
    ("gpt_model_type", "batch_scheduler_policy"),
    ("gpt_model_type", "scheduler_policy"),
    ("batching_type", "batch_scheduler_policy"),
    ("batching_type", "scheduler_policy"),
    ("batching_strategy", "batch_scheduler_policy"),
    ("batching_strategy", "scheduler_policy"),
}
"""Pairs of parameters often set together that may differ. The first wins: V1, for example, has no policy to choose."""

RuleFinder = Callable[[str], Rule | None]
"""Finds the rule of a parameter; None for one that the runtime does not have."""
_RULE_FINDERS: Mapping[Runtime, Callable[[EngineConfig, Mapping[str, str]], RuleFinder]] = MappingProxyType(
    {
        Runtime.OPENVINO: lambda engine, texts: OPENVINO_RULES.get,
        Runtime.TENSORRT_LLM: tensorrt_llm_rules,
        Runtime.TORCH: lambda engine, texts: TORCH_RULES.get,
        Runtime.VLLM: vllm_rules,
    }
)
_CODE_CHOICES: Mapping[Runtime, CodeChoices] = MappingProxyType(
    {Runtime.TENSORRT_LLM: TENSORRT_LLM_CODE, Runtime.VLLM: VLLM_CODE}
)
"""The choices of code of the runtimes that take arguments by their own names."""


def parameter_texts(config: ModelConfig) -> dict[str, str]:
    """Return the parameters that are set. An empty value or an unfilled `${name}` of a template does not count."""
    texts = {key: each.string_value.strip() for key, each in config.parameters.items()}
    return {key: text for key, text in texts.items() if text and not _TEMPLATE.fullmatch(text)}


def excludes_input(config: ModelConfig) -> bool:
    """Whether output_ids leave the prompt out by default."""
    return parse_bool(parameter_texts(config).get("exclude_input_in_output", "false"))


def apply_parameters(engine: EngineConfig, model: str, texts: Mapping[str, str]) -> tuple[EngineConfig, list[str]]:
    """Return `engine`, with a runtime other than AUTO, with the parameters of `model` applied, and notes on those
    without effect. Raises INVALID, naming the parameter, for one that cannot be applied and must not be ignored."""
    find_rule = _rule_finder(engine, texts)
    combined = _CombinedEffects(model)
    for key in sorted(texts, key=_precedence):
        rule = find_rule(key)
        if rule is None:
            combined.add(key, Effect(note=_unknown_note(key, engine.runtime)))
        else:
            combined.add(key, _effect(rule, model, key, texts[key]))
    return combined.apply_to(engine), combined.notes


@dataclass(slots=True)
class _CombinedEffects:
    """The combined effects of a model's parameters. `_setters` maps what is set to the parameter that set it."""

    model: str
    fields: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _setters: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, effect: Effect) -> None:
        """Add the effect of parameter `key`. Raises SluiceError INVALID where it contradicts another parameter."""
        before = {**self.fields, **self.settings}
        new = {**effect.fields, **effect.settings}
        other = next((self._setters[name] for name, value in new.items() if before.get(name, value) != value), None)
        if other is None:
            self.fields.update(effect.fields)
            self.settings.update(effect.settings)
            self._setters.update(dict.fromkeys(new, key))
        elif (other, key) not in _PRECEDENCE:
            raise invalid(key, f"parameters '{other}' and '{key}' of model '{self.model}' contradict each other")
        note = effect.note if other is None else f"{other} decides"
        if note:
            self.notes.append(f"{key}: {note}")

    def apply_to(self, engine: EngineConfig) -> EngineConfig:
        fields = dict(self.fields)
        fields["runtime_settings"] = self._without_own(engine) | self.settings
        return _with_fields(engine, fields)

    def _without_own(self, engine: EngineConfig) -> dict[str, str]:
        """Return the command line's settings without those that the model sets itself, by any name."""
        target, given = RUNTIMES[engine.runtime].settings.target, engine.runtime_settings
        own = {target(name) for name in (*self.settings, *self.fields)}
        return {name: text for name, text in given.items() if target(name) not in own}


def _precedence(key: str) -> tuple[bool, str]:
    """Return a sort key by which parameters that win over others come first."""
    return (all(key != first for first, _ in _PRECEDENCE), key)


def _effect(rule: Rule, model: str, key: str, text: str) -> Effect:
    try:
        return rule(text)
    except ValueError as error:
        raise invalid(key, f"parameter '{key}' of model '{model}' {error}, got '{text}'") from None


def _unknown_note(key: str, runtime: Runtime) -> str:
    others = " or ".join(spec.title for spec in RUNTIMES.values() if key in spec.settings)
    if not others:
        return "is unknown and has no effect"
    here = RUNTIMES[runtime]
    names = full_names(key, here.settings)
    also = f", where it is called {' or '.join(names[:3])}" if names else ""
    return f"only {others} has it, and the model runs on {here.title}{also}"


def _rule_finder(engine: EngineConfig, texts: Mapping[str, str]) -> RuleFinder:
    """Return a function that finds a parameter's rule on the engine's runtime."""
    if engine.runtime in _RULE_FINDERS:
        return _RULE_FINDERS[engine.runtime](engine, texts)
    settings = RUNTIMES[engine.runtime].settings
    return lambda key: SHARED_RULES.get(key) or (setting_rule(settings[key]) if key in settings else None)


def _with_fields(engine: EngineConfig, fields: dict[str, Any]) -> EngineConfig:
    """Replace fields. Where only one of the two sizes of a step is set and they do not fit, the other follows it."""
    if not fields:
        return engine
    if "max_num_batched_tokens" in fields:
        fields["chooses_chunk"] = False
    num_seqs = fields.get("max_num_seqs", engine.max_num_seqs)
    num_tokens = fields.get("max_num_batched_tokens", engine.max_num_batched_tokens)
    if num_tokens < num_seqs:
        if "max_num_batched_tokens" not in fields:
            fields["max_num_batched_tokens"] = num_seqs
        elif "max_num_seqs" not in fields:
            fields["max_num_seqs"] = num_tokens
    return msgspec.structs.replace(engine, **fields)


def without_code(arguments: Mapping[str, Any], runtime: Runtime) -> tuple[dict[str, Any], list[str]]:
    """Return a model's arguments for its runtime's own library without those that choose code to run, and notes on
    these."""
    choices = _CODE_CHOICES.get(runtime, {})
    dropped = [name for name, value in arguments.items() if chooses_code(name, value, choices)]
    kept = {name: value for name, value in arguments.items() if name not in dropped}
    return kept, [f"{name}: {FROM_COMMAND_LINE}" for name in dropped]


def merge_arguments(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings of arguments, and recursively those nested in both. `over` wins."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merge_arguments(below, value)
        merged[key] = value
    return merged
