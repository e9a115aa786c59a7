"""A model's folder, configuration and arguments over the command line's: which runtime serves it, and how."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.config import EngineConfig, Runtime
from engine.runtimes import RuntimeChoice, choose_runtime
from pipelines.llm.checkpoint import CheckpointFolder, find_checkpoint, resolved, text_of, vllm_arguments
from pipelines.llm.effects import truth
from pipelines.llm.llm_arguments import MODEL_FILE, ModelYaml, merged, read_model_yaml
from pipelines.llm.lora_modules import read_lora_file
from pipelines.llm.options import unused_options
from pipelines.llm.parameters import apply, texts_of
from pipelines.llm.queueing import unused_rules
from pipelines.llm.shared_rules import runtime_of
from serving.spec import ModelSource
from sluice.errors import invalid

_PATHS = ("lora_dir", "draft_model_path")
"""Parameters that the engine's process opens."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model version is served."""

    checkpoint: CheckpointFolder
    engine: EngineConfig
    choice: RuntimeChoice
    texts: dict[str, str]
    """Its parameters, from all its files."""
    notes: list[str]
    """On what has no effect as written."""


def set_up(source: ModelSource, engine_config: Callable[[str, Runtime | None], EngineConfig]) -> Setup:
    """Read the model's files and choose its runtime. `engine_config` is that of `LlmServices`.

    Raises SluiceError: NOT_FOUND without a checkpoint, INVALID for a parameter that cannot be obeyed, UNAVAILABLE where
    the model needs a runtime that is not installed.
    """
    yaml = read_model_yaml(source.version_folder)
    texts = _texts(source, yaml)
    checkpoint = find_checkpoint(source, texts, engine_config(str(source.version_folder), None).engine_python)
    named = _named_runtime(source.name, texts)
    # Adapters and tokenizer of the command line are MODEL's.
    given = msgspec.structs.replace(engine_config(str(checkpoint.path), named), lora_modules={}, tokenizer_path=None)
    choice = choose_runtime(given)
    engine = msgspec.structs.replace(given, runtime=choice.runtime)  # chosen once: rules, notes and process go by it
    notes: list[str] = []
    if "llm_arguments" not in choice.spec.ignored_fields:
        engine = _for_tensorrt_llm(engine, checkpoint, yaml)
    else:
        texts, notes = _as_parameters(yaml, texts)
    engine, told = apply(engine, source.name, texts)
    engine = _with_adapters(engine, source)
    notes = [*told, *notes, *unused_rules(source.config), *unused_options(engine, choice.runtime)]
    return Setup(checkpoint, engine, choice, texts, notes)


def _texts(source: ModelSource, yaml: ModelYaml) -> dict[str, str]:
    """What files of the version say goes over config.pbtxt."""
    texts = texts_of(source.config) | yaml.texts | vllm_arguments(source.version_folder)
    max_queue_size = source.config.dynamic_batching.default_queue_policy.max_queue_size
    if max_queue_size:
        texts.setdefault("max_queue_size", str(max_queue_size))
    if _has_lora(texts) and (adapters := read_lora_file(source.version_folder)) is not None:
        texts.setdefault("lora_modules", adapters)
    return texts | {key: _resolved_paths(source, texts[key]) for key in _PATHS if key in texts}


def _resolved_paths(source: ModelSource, text: str) -> str:
    """Several have commas between."""
    return ",".join(resolved(source, path.strip()) for path in text.split(","))


def _has_lora(texts: dict[str, str]) -> bool:
    try:
        return truth(texts.get("enable_lora", "false"))
    except ValueError:
        return False  # its rule says what is wrong with it


def _named_runtime(model: str, texts: dict[str, str]) -> Runtime | None:
    if "runtime" not in texts:
        return None
    try:
        return runtime_of(texts["runtime"])
    except ValueError as error:
        message = f"parameter 'runtime' of model '{model}' {error}, got '{texts['runtime']}'"
        raise invalid("runtime", message) from None


def _for_tensorrt_llm(engine: EngineConfig, checkpoint: CheckpointFolder, yaml: ModelYaml) -> EngineConfig:
    is_elsewhere = checkpoint.tokenizer != checkpoint.path
    return msgspec.structs.replace(
        engine,
        llm_arguments=merged(engine.llm_arguments, yaml.arguments),
        tokenizer_path=str(checkpoint.tokenizer) if is_elsewhere else None,
    )


def _as_parameters(yaml: ModelYaml, texts: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """What a `model.yaml` says to a runtime that its arguments are not of, and notes on what cannot be said."""
    nested = [key for key, value in yaml.arguments.items() if isinstance(value, (dict, list))]
    plain = {key: text_of(value) for key, value in yaml.arguments.items() if key not in nested and value is not None}
    return plain | texts, [f"{MODEL_FILE}: {', '.join(nested)}: only TensorRT-LLM has these"] if nested else []


def _with_adapters(engine: EngineConfig, source: ModelSource) -> EngineConfig:
    """Their folders as the engine's process can open them."""
    if not engine.lora_modules:
        return engine
    folders = {name: resolved(source, folder) for name, folder in engine.lora_modules.items()}
    return msgspec.structs.replace(engine, lora_modules=folders)
