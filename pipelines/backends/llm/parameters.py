"""The parameters of an LLM's config.pbtxt over the options of the command line."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.config import EngineConfig
from engine.errors import invalid
from pipelines.backends.llm.rules import RULES, Effect, truth

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


def texts_of(config: ModelConfig) -> dict[str, str]:
    """The parameters that are set: an empty value, or a template's `${name}` that nobody filled in, is not."""
    texts = {key: each.string_value.strip() for key, each in config.parameters.items()}
    return {key: text for key, text in texts.items() if text and not _TEMPLATE.fullmatch(text)}


def excludes_input(config: ModelConfig) -> bool:
    """Whether output_ids leave the prompt out where the request does not say."""
    return truth(texts_of(config).get("exclude_input_in_output", "false"))


def apply(engine: EngineConfig, model: str, texts: Mapping[str, str]) -> tuple[EngineConfig, list[str]]:
    """`engine` as the parameters of `model` want it, and notes on those that have no effect.

    Raises SluiceError INVALID, naming the parameter, for what cannot be done and must not be ignored.
    """
    fields: dict[str, Any] = {}
    setters: dict[str, str] = {}
    notes: list[str] = []
    for key in sorted(texts, key=_order):
        effect = _effect(model, key, texts[key])
        other = next((setters[name] for name, value in effect.fields.items() if fields.get(name, value) != value), None)
        if other is None:
            fields.update(effect.fields)
            setters.update(dict.fromkeys(effect.fields, key))
        elif (other, key) not in _YIELDS:
            raise invalid(key, f"parameters '{other}' and '{key}' of model '{model}' contradict each other")
        note = effect.note if other is None else f"{other} decides"
        if note:
            notes.append(f"{key}: {note}")
    return _with_fields(engine, fields), notes


def _order(key: str) -> tuple[bool, str]:
    """Those before which others yield come first."""
    return (all(key != first for first, _ in _YIELDS), key)


def _effect(model: str, key: str, text: str) -> Effect:
    rule = RULES.get(key)
    if rule is None:
        return Effect(note="is unknown and has no effect")
    try:
        return rule(text)
    except ValueError as error:
        raise invalid(key, f"parameter '{key}' of model '{model}' {error}, got '{text}'") from None


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
