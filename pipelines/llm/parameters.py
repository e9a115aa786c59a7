"""The parameters of an LLM's config.pbtxt over the options of the command line."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.config import EngineConfig, Runtime
from engine.delegated.tensorrt_llm.configuration.catalogue import SETTINGS
from engine.model_folder import ModelFormat, model_format
from pipelines.llm import tensorrt_llm_rules
from pipelines.llm.effects import Effect, Rule, truth
from pipelines.llm.llm_arguments import merged
from pipelines.llm.rules import RULES
from sluice.errors import invalid

_TEMPLATE = re.compile(r"\$\{\w*\}")

_YIELDS = {
    ("max_tokens_in_paged_kv_cache", "kv_cache_free_gpu_mem_fraction"),
    ("gpt_model_type", "batch_scheduler_policy"),
    ("gpt_model_type", "scheduler_policy"),
    ("batching_type", "batch_scheduler_policy"),
    ("batching_type", "scheduler_policy"),
    ("batching_strategy", "batch_scheduler_policy"),
    ("batching_strategy", "scheduler_policy"),
}
"""Pairs that are usual and may differ: the first decides. V1 has no policy to choose."""
_COMPILED = (ModelFormat.TENSORRT_LLM_ENGINE, ModelFormat.TENSORRT_LLM_CHECKPOINT)
"""What is an engine when it runs."""
_ONLY_TENSORRT_LLM = "only TensorRT-LLM has it, and the model runs on OpenVINO"


def texts_of(config: ModelConfig) -> dict[str, str]:
    """The parameters that are set: an empty value, or a template's `${name}` that nobody filled in, is not."""
    texts = {key: each.string_value.strip() for key, each in config.parameters.items()}
    return {key: text for key, text in texts.items() if text and not _TEMPLATE.fullmatch(text)}


def excludes_input(config: ModelConfig) -> bool:
    """Whether output_ids leave the prompt out where the request does not say."""
    return truth(texts_of(config).get("exclude_input_in_output", "false"))


def apply(engine: EngineConfig, model: str, texts: Mapping[str, str]) -> tuple[EngineConfig, list[str]]:
    """`engine` as the parameters of `model` want it on `engine.runtime`, and notes on those that have no effect.

    Raises SluiceError INVALID, naming the parameter, for what cannot be done and must not be ignored.
    """
    find = _finder(engine, texts)
    gathered = _Gathered(model)
    for key in sorted(texts, key=_order):
        gathered.take(key, _effect(find(key), model, key, texts[key]))
    return gathered.over(engine), gathered.notes


@dataclass(slots=True)
class _Gathered:
    """What several parameters want together."""

    model: str
    fields: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _setters: dict[str, str] = field(default_factory=dict)

    def take(self, key: str, effect: Effect) -> None:
        """Raises SluiceError INVALID where another parameter wants something else."""
        before = {**self.fields, **self.settings}
        wanted = {**effect.fields, **effect.settings}
        other = next((self._setters[name] for name, value in wanted.items() if before.get(name, value) != value), None)
        if other is None:
            self.fields.update(effect.fields)
            self.settings.update(effect.settings)
            self.arguments = merged(self.arguments, effect.arguments)
            self._setters.update(dict.fromkeys(wanted, key))
        elif (other, key) not in _YIELDS:
            raise invalid(key, f"parameters '{other}' and '{key}' of model '{self.model}' contradict each other")
        note = effect.note if other is None else f"{other} decides"
        if note:
            self.notes.append(f"{key}: {note}")

    def over(self, engine: EngineConfig) -> EngineConfig:
        fields = dict(self.fields)
        fields["runtime_settings"] = self._others(engine.runtime_settings) | self.settings
        if self.arguments:
            fields["llm_arguments"] = merged(engine.llm_arguments, self.arguments)
        return _with_fields(engine, fields)

    def _others(self, given: Mapping[str, str]) -> dict[str, str]:
        """The command line's settings but those of what the model sets itself, by whichever name."""
        own = {_target(name) for name in (*self.settings, *self.fields)}
        return {name: text for name, text in given.items() if _target(name) not in own}


def _target(name: str) -> str:
    """What a setting sets; of other fields of EngineConfig, their own name."""
    setting = SETTINGS.get(name)
    return name if setting is None else setting.target or setting.name


def _order(key: str) -> tuple[bool, str]:
    """Those before which others yield come first."""
    return (all(key != first for first, _ in _YIELDS), key)


def _effect(rule: Rule | None, model: str, key: str, text: str) -> Effect:
    if rule is None:
        return Effect(note=_ONLY_TENSORRT_LLM if key in SETTINGS else "is unknown and has no effect")
    try:
        return rule(text)
    except ValueError as error:
        raise invalid(key, f"parameter '{key}' of model '{model}' {error}, got '{text}'") from None


def _finder(engine: EngineConfig, texts: Mapping[str, str]) -> Callable[[str], Rule | None]:
    """Finds a parameter's rule on the runtime."""
    if engine.runtime is not Runtime.TENSORRT_LLM:
        return RULES.get
    backend = texts.get("backend", engine.llm_arguments.get("backend"))
    is_compiled = backend == "tensorrt" or model_format(Path(engine.model_path)) in _COMPILED
    return partial(tensorrt_llm_rules.rule_of, is_compiled=is_compiled)


def _with_fields(engine: EngineConfig, fields: dict[str, Any]) -> EngineConfig:
    """The sizes of a step must go together; where only one is given, the other follows it."""
    if not fields:
        return engine
    num_seqs = fields.get("max_num_seqs", engine.max_num_seqs)
    num_tokens = fields.get("max_num_batched_tokens", engine.max_num_batched_tokens)
    if num_tokens < num_seqs:
        if "max_num_batched_tokens" not in fields:
            fields["max_num_batched_tokens"] = num_seqs
        elif "max_num_seqs" not in fields:
            fields["max_num_seqs"] = num_tokens
    return msgspec.structs.replace(engine, **fields)
