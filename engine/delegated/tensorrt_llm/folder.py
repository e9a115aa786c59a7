"""Facts of a model folder that are known before TensorRT-LLM has loaded it: vocabulary, end tokens, context."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.model_folder import ModelFormat, model_format, read_json
from sluice.errors import invalid

Fields = Mapping[str, Any]

_CONTEXT_NAMES = ("max_position_embeddings", "max_sequence_length", "n_positions", "seq_length", "max_seq_len", "n_ctx")
"""Longest context in a HuggingFace config.json, by the names that model families have for it."""
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Sections that describe the language model of a model of text and images."""
_STRETCHING = frozenset({"linear", "dynamic"})
"""Kinds of rope scaling that make the context longer than max_position_embeddings, as TensorRT-LLM reckons it."""
_PARALLEL = {
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "context_parallel_size": "cp_size",
    "moe_tensor_parallel_size": "moe_tp_size",
    "moe_expert_parallel_size": "moe_ep_size",
}
"""LLM arguments, and their names in the mapping of a converted checkpoint."""


@dataclass(frozen=True, slots=True)
class LlmFolder:
    """A HuggingFace checkpoint, a converted checkpoint or a compiled engine."""

    path: Path
    format: ModelFormat
    model_type: str
    dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    """The end tokens of generation_config.json, else of config.json; the first is TensorRT-LLM's end_id."""
    max_model_len: int
    """The longest context that the model was made for, or the engine compiled for."""
    quantization: str = "none"
    build_config: dict[str, object] | None = None
    """Limits of a compiled engine: max_batch_size, max_num_tokens, max_input_len, max_seq_len, max_beam_width."""
    parallel_sizes: dict[str, int] = field(default_factory=dict)
    """GPUs that a converted checkpoint or an engine is spread over, by LLM argument."""


def read_folder(path: Path, tokenizer: Path | None = None) -> LlmFolder:
    """Read a model folder. End tokens are looked for in `tokenizer` too: the folder of an engine often has none. Raises
    INVALID or NOT_FOUND with what is missing or cannot be read."""
    found = model_format(path)
    config = read_json(path / "config.json")
    ends = _eos_token_ids(config, path, tokenizer)
    match found:
        case ModelFormat.TENSORRT_LLM_ENGINE:
            return _read_engine(path, config, ends)
        case ModelFormat.TENSORRT_LLM_CHECKPOINT:
            return _read_converted(path, config, ends)
        case ModelFormat.HUGGINGFACE:
            return _read_huggingface(path, config, ends)
    raise invalid("model_path", f"{path} holds no model that TensorRT-LLM runs: {found or 'no config.json'}")


def _read_huggingface(path: Path, config: Fields, ends: tuple[int, ...]) -> LlmFolder:
    text = _text_part(config)
    source = path / "config.json"
    context = next((text[name] for name in _CONTEXT_NAMES if isinstance(text.get(name), int)), None)
    if context is None:
        raise invalid("model_path", f"{source} tells no longest context; it must have {_CONTEXT_NAMES[0]}")
    return LlmFolder(
        path,
        ModelFormat.HUGGINGFACE,
        str(text.get("model_type") or config.get("model_type") or "unknown"),
        str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "auto"),
        _number(text, "vocab_size", source),
        ends,
        round(context * _rope_factor(text)),
        _huggingface_quantization(path, config),
    )


def _text_part(config: Fields) -> Fields:
    return next((config[name] for name in _TEXT_PARTS if isinstance(config.get(name), dict)), config)


def _rope_factor(text: Fields) -> float:
    """Return how much rope scaling adds to the context that is stated; most kinds are included in it."""
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) not in _STRETCHING:
        return 1.0
    factor = rope.get("factor")
    return float(factor) if isinstance(factor, int | float) else 1.0


def _huggingface_quantization(path: Path, config: Fields) -> str:
    """Return the algorithm, else the method, of ModelOpt's hf_quant_config.json, else of quantization_config."""
    file = path / "hf_quant_config.json"
    section = read_json(file).get("quantization") if file.is_file() else config.get("quantization_config")
    if not isinstance(section, dict):
        return "none"
    return str(section.get("quant_algo") or section.get("quant_method") or "none").lower()


def _read_engine(path: Path, config: Fields, ends: tuple[int, ...]) -> LlmFolder:
    pretrained, build = config.get("pretrained_config"), config.get("build_config")
    if not isinstance(pretrained, dict) or not isinstance(build, dict):
        raise invalid(
            "model_path",
            f"{path / 'config.json'} is not an engine's: it must have pretrained_config and build_config, as "
            "trtllm-build writes it",
        )
    return _read_converted(path, pretrained, ends, build)


def _read_converted(
    path: Path, config: Fields, ends: tuple[int, ...], build: dict[str, object] | None = None
) -> LlmFolder:
    """Read a converted checkpoint, or the engine that was compiled of it by `build`."""
    source = path / "config.json"
    is_engine = build is not None
    mapping = _section(config, "mapping")
    return LlmFolder(
        path,
        ModelFormat.TENSORRT_LLM_ENGINE if is_engine else ModelFormat.TENSORRT_LLM_CHECKPOINT,
        str(config.get("architecture", "unknown")),
        str(config.get("dtype", "auto")),
        _number(config, "vocab_size", source),
        ends,
        _number(config if build is None else build, "max_seq_len" if is_engine else "max_position_embeddings", source),
        str(_section(config, "quantization").get("quant_algo") or "none").lower(),
        build,
        {name: mapping[key] for name, key in _PARALLEL.items() if isinstance(mapping.get(key), int)},
    )


def _section(config: Fields, name: str) -> Fields:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _number(config: Fields, name: str, source: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise invalid("model_path", f"{source}: {name} must be a whole number of 1 or more, got {value!r}")
    return value


def _eos_token_ids(config: Fields, path: Path, tokenizer: Path | None) -> tuple[int, ...]:
    """Return those of the first place that has any: generation_config.json, config.json, the tokenizer's own files."""
    folders = [path] if tokenizer is None else [path, tokenizer]
    for folder in folders:
        file = folder / "generation_config.json"
        if file.is_file() and (ends := _as_ids(read_json(file).get("eos_token_id"))):
            return ends
    for part in (config, _text_part(config), config.get("pretrained_config")):
        if isinstance(part, Mapping) and (ends := _as_ids(part.get("eos_token_id"))):
            return ends
    return next((ends for folder in folders if (ends := _tokenizer_end(folder))), ())


def _as_ids(value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    return tuple(each for each in ids if isinstance(each, int) and not isinstance(each, bool) and each >= 0)


def _tokenizer_end(folder: Path) -> tuple[int, ...]:
    """Return the id that tokenizer.json has for tokenizer_config.json's eos_token."""
    config, vocabulary = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not config.is_file() or not vocabulary.is_file():
        return ()
    token = read_json(config).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = read_json(vocabulary).get("added_tokens")
    return _as_ids([each.get("id") for each in added or () if each.get("content") == text][:1])
