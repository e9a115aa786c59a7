"""Facts of a model folder that are known before TensorRT-LLM has loaded it: vocabulary, end tokens, context."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.engine.model_folder import ModelFormat, model_format, read_json
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
    build_config: dict[str, Any] | None = None
    """Limits of a compiled engine: max_batch_size, max_num_tokens, max_input_len, max_seq_len, max_beam_width."""
    parallel_sizes: dict[str, int] = field(default_factory=dict)
    """GPUs that a converted checkpoint or an engine is spread over, by LLM argument."""
    hidden_size: int | None = None
    num_layers: int | None = None
    """As config.json has them; None where it has none."""

    @property
    def plugins(self) -> Fields:
        """The parts that a compiled engine has built in, besides its limits."""
        return _section(self.build_config or {}, "plugin_config")


def read_folder(path: Path, tokenizer: Path | None = None) -> LlmFolder:
    """Read a model folder. End tokens are looked for in `tokenizer` too: the folder of an engine often has none. Raises
    INVALID or NOT_FOUND with what is missing or cannot be read."""
    found = model_format(path)
    config = read_json(path / "config.json")
    ends = _eos_token_ids(config, path, tokenizer)
    match found:
        case ModelFormat.TENSORRT_LLM_ENGINE | ModelFormat.TENSORRT_LLM_CHECKPOINT:
            return _read_converted(path, config, ends, is_engine=found is ModelFormat.TENSORRT_LLM_ENGINE)
        case ModelFormat.HUGGINGFACE:
            return _read_huggingface(path, config, ends)
    raise invalid("model_path", f"{path} holds no model that TensorRT-LLM runs: {found or 'no config.json'}")


def _read_huggingface(path: Path, config: Fields, ends: tuple[int, ...]) -> LlmFolder:
    text = _text_part(config)
    source = path / "config.json"
    context = next((text[name] for name in _CONTEXT_NAMES if isinstance(text.get(name), int)), None)
    if context is None:
        raise invalid("model_path", f"{source} tells no longest context; it must have {_CONTEXT_NAMES[0]}")
    if (most := round(context * _rope_factor(text))) < 1:
        raise invalid("model_path", f"{source}: the longest context must be of 1 token or more, got {most}")
    return LlmFolder(
        path,
        ModelFormat.HUGGINGFACE,
        str(text.get("model_type") or config.get("model_type") or "unknown"),
        str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "auto"),
        _number(text, "vocab_size", source),
        ends,
        most,
        _huggingface_quantization(path, config),
        hidden_size=text.get("hidden_size"),
        num_layers=text.get("num_hidden_layers"),
    )


def _text_part(config: Fields) -> Fields:
    return next((part for part in (_section(config, name) for name in _TEXT_PARTS) if part), config)


def _rope_factor(text: Fields) -> float:
    """Return how much rope scaling adds to the context that is stated; most kinds are included in it."""
    rope = _section(text, "rope_scaling") or _section(text, "rope_parameters")
    factor = rope.get("factor") if rope.get("rope_type", rope.get("type")) in _STRETCHING else None
    return float(factor) if isinstance(factor, int | float) else 1.0


def _huggingface_quantization(path: Path, config: Fields) -> str:
    """Return the algorithm, else the method, of ModelOpt's hf_quant_config.json, else of quantization_config."""
    file = path / "hf_quant_config.json"
    section = _section(read_json(file), "quantization") if file.is_file() else _section(config, "quantization_config")
    return str(section.get("quant_algo") or section.get("quant_method") or "none").lower()


def _read_converted(path: Path, config: Fields, ends: tuple[int, ...], *, is_engine: bool) -> LlmFolder:
    """Read a converted checkpoint, or an engine that was compiled of one."""
    source, build = path / "config.json", config.get("build_config") if is_engine else None
    if is_engine:
        config = _section(config, "pretrained_config")
        if not config or not isinstance(build, dict):
            parts = "it must have pretrained_config and build_config, as trtllm-build writes it"
            raise invalid("model_path", f"{source} is not an engine's: {parts}")
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
        config.get("hidden_size"),
        config.get("num_hidden_layers"),
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
    folders = [path, *([tokenizer] if tokenizer is not None else ())]
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
    tokens = [each for each in added if isinstance(each, dict)] if isinstance(added, list) else []
    return _as_ids([each.get("id") for each in tokens if each.get("content") == text][:1])
