"""Decides how a model version is served: its checkpoint, its runtime, and its parameters over the command line's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelQueuePolicy

from sluice.engine.config import EngineConfig, Runtime
from sluice.engine.runtimes import RUNTIMES, RuntimeChoice, choose_runtime
from sluice.errors import SluiceError, invalid
from sluice.pipelines.chat.registry import find_formats
from sluice.pipelines.llm.model_folder import (
    MODEL_YAML,
    CheckpointFolder,
    ModelYaml,
    find_checkpoint,
    parameter_text,
    read_lora_file,
    read_model_yaml,
    read_vllm_arguments,
    resolve_path,
)
from sluice.pipelines.llm.parameter_effects import parse_bool, parse_runtime
from sluice.pipelines.llm.parameters import apply_parameters, merge_arguments, parameter_texts, without_code
from sluice.pipelines.llm.services import DEFAULT_CHAT
from sluice.pipelines.llm.tensorrt_llm_parameters import unknown_arguments
from sluice.serving.spec import ModelSource

_NO_OPTIONS = EngineConfig(model_path="")

_OPTION_FLAGS = {
    "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "lora_modules": "--lora-modules",
    "engine_python": "--engine-python",
    "launcher": "--engine-launcher",
    "runtime_settings": "--runtime-setting",
    "llm_arguments": "--extra-llm-api-options",
}
"""Flags, by field, of options that not every runtime obeys. TensorRT-LLM's process reports itself what it ignores."""
_PATHS = ("lora_dir", "draft_model_path")
"""Parameters with paths that the engine's process opens."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model version is served."""

    checkpoint: CheckpointFolder
    engine: EngineConfig
    choice: RuntimeChoice
    texts: dict[str, str]
    """The model's parameters, from all its files."""
    num_replicas: int
    """Engines that serve the version together."""
    notes: list[str]
    """Notes on fields, parameters and options that have no effect as written."""


def set_up(source: ModelSource, engine_config: Callable[[str, Runtime | None], EngineConfig]) -> Setup:
    """Read the model's files and choose its runtime. `engine_config` is that of `LlmServices`. Raises NOT_FOUND without
    a checkpoint, INVALID for a parameter that cannot be applied, UNAVAILABLE without the needed runtime."""
    yaml = read_model_yaml(source.version_folder)
    texts = _collect_parameters(source, yaml)
    _check_parsers(source.name, texts)
    checkpoint = find_checkpoint(source, texts, engine_config(str(source.version_folder), None).engine_python)
    named = _named_runtime(source.name, texts)
    # The command line's adapters and tokenizer belong to MODEL.
    given = msgspec.structs.replace(engine_config(str(checkpoint.path), named), lora_modules={}, tokenizer_path=None)
    choice = choose_runtime(given)
    engine = msgspec.structs.replace(given, runtime=choice.runtime)  # chosen once, for rules, notes and process
    if "llm_arguments" not in choice.spec.ignored_fields:
        arguments, code_notes = without_code(yaml.arguments, choice.runtime)
        engine = _with_arguments(engine, checkpoint, arguments)
        unknown = unknown_arguments(arguments) if choice.runtime is Runtime.TENSORRT_LLM else ()
        yaml_notes = [f"{MODEL_YAML}: {note}" for note in (*code_notes, *unknown)]
    else:
        texts, yaml_notes = _as_parameters(yaml, texts)
    engine, notes = apply_parameters(engine, source.name, texts)
    engine = _with_adapter_paths(engine, source)
    notes += [*yaml.notes, *yaml_notes, *ignored_queue_fields(source.config), *ignored_options(engine, choice.runtime)]
    num_replicas = max(1, sum(group.count for group in source.config.instance_group))
    return Setup(checkpoint, engine, choice, texts, num_replicas, notes)


def ignored_options(engine: EngineConfig, runtime: str) -> list[str]:
    """Return notes on options of the command line that were given and have no effect on `runtime`."""
    ignored = RUNTIMES[Runtime(runtime)].ignored_fields
    given = [
        flag
        for name, flag in _OPTION_FLAGS.items()
        if name in ignored and getattr(engine, name) != getattr(_NO_OPTIONS, name)
    ]
    return [f"{flag}: {runtime} has no use for it" for flag in given]


def _collect_parameters(source: ModelSource, yaml: ModelYaml) -> dict[str, str]:
    """Return the parameters of config.pbtxt and of the version's files, which win over it."""
    texts = parameter_texts(source.config) | yaml.texts | read_vllm_arguments(source.version_folder)
    max_queue_size = source.config.dynamic_batching.default_queue_policy.max_queue_size
    if max_queue_size:
        texts.setdefault("max_queue_size", str(max_queue_size))
    if _has_lora(texts) and (adapters := read_lora_file(source.version_folder)) is not None:
        texts.setdefault("lora_modules", adapters)
    for key in _PATHS:
        if key in texts:  # a path, or several with commas between them
            texts[key] = ",".join(resolve_path(source, path.strip()) for path in texts[key].split(","))
    return texts


def _has_lora(texts: dict[str, str]) -> bool:
    try:
        return parse_bool(texts.get("enable_lora", "false"))
    except ValueError:
        return False  # the parameter's rule raises the error


def _check_parsers(model: str, texts: dict[str, str]) -> None:
    chat = DEFAULT_CHAT.with_parameters(texts)
    try:
        find_formats("", chat.tool_call_parser, chat.reasoning_parser)
    except SluiceError as error:
        raise invalid(error.param or "", f"model '{model}': parameter {error.message}") from None


def _named_runtime(model: str, texts: dict[str, str]) -> Runtime | None:
    if "runtime" not in texts:
        return None
    try:
        return parse_runtime(texts["runtime"])
    except ValueError as error:
        message = f"parameter 'runtime' of model '{model}' {error}, got '{texts['runtime']}'"
        raise invalid("runtime", message) from None


def _with_arguments(engine: EngineConfig, checkpoint: CheckpointFolder, arguments: Mapping[str, Any]) -> EngineConfig:
    is_elsewhere = checkpoint.tokenizer != checkpoint.path
    return msgspec.structs.replace(
        engine,
        llm_arguments=merge_arguments(engine.llm_arguments, arguments),
        tokenizer_path=str(checkpoint.tokenizer) if is_elsewhere else None,
    )


def _as_parameters(yaml: ModelYaml, texts: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return `texts` over `model.yaml`'s arguments. Nested ones have no form as a parameter; a note lists them."""
    nested = [key for key, value in yaml.arguments.items() if isinstance(value, (dict, list))]
    plain = {
        key: parameter_text(value) for key, value in yaml.arguments.items() if key not in nested and value is not None
    }
    return plain | texts, [f"{MODEL_YAML}: {', '.join(nested)}: only TensorRT-LLM has these"] if nested else []


def _with_adapter_paths(engine: EngineConfig, source: ModelSource) -> EngineConfig:
    """Resolve the folders of adapters, so that the engine's process can open them."""
    if not engine.lora_modules:
        return engine
    folders = {name: resolve_path(source, folder) for name, folder in engine.lora_modules.items()}
    return msgspec.structs.replace(engine, lora_modules=folders)


def ignored_queue_fields(config: ModelConfig) -> list[str]:
    """Return notes on fields that have no effect, because an engine batches in flight."""
    batching, notes = config.dynamic_batching, []
    if batching.preferred_batch_size or batching.max_queue_delay_microseconds:
        notes.append("dynamic_batching: a request joins the running batch at its next step")
    if batching.preserve_ordering:
        notes.append("dynamic_batching.preserve_ordering: an answer is given when it is complete")
    if batching.priority_queue_policy:
        notes.append("dynamic_batching.priority_queue_policy: the default policy is every level's")
    policy = batching.default_queue_policy
    if policy.default_timeout_microseconds and policy.timeout_action == ModelQueuePolicy.DELAY:
        notes.append("dynamic_batching.default_queue_policy.timeout_action: what waited too long is refused")
    return notes
