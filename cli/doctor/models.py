"""Finds the models that a MODEL argument names, and reads their facts from their folders, without loading them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sluice.cli.checkpoint_files import MANIFEST, sha256_of, tokenizer_file
from sluice.cli.doctor.facts import ModelFacts, ModelSize
from sluice.cli.doctor.findings import DoctorFinding, fail, note
from sluice.cli.gpus import ComputeCapability
from sluice.engine.config import EngineConfig, Runtime
from sluice.engine.model_folder import ModelFormat, model_format
from sluice.engine.models.weights.files import QUANTIZATIONS, compressed_file
from sluice.engine.runtimes import RuntimeChoice, runtimes_for
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.checkpoint import find_cached, is_hub_id, model_name
from sluice.pipelines.llm.backend import LlmBackend
from sluice.pipelines.llm.setup import set_up
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.repository.candidate import read_candidate
from sluice.serving.repository.folders import ModelFolder, list_versions
from sluice.serving.spec import ModelSource


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """A model to check. `config` is its engine's configuration, or a finding if there is none."""

    name: str
    config: EngineConfig | DoctorFinding
    tokenizer: Path | None = None
    """The tokenizer's folder, where it is not the model's."""
    choice: RuntimeChoice | None = None
    """The runtime, where the model's configuration already chose one."""


def find_targets(path: str, config: EngineConfig) -> Iterator[ModelTarget]:
    """Yield the model in a folder, or every language model of a repository. `config` holds the command line's options.

    Raises SluiceError NOT_FOUND where `path` is neither.
    """
    folder = Path(path).expanduser()
    if not folder.exists() and is_hub_id(path):
        yield _hub_target(path, config)
    elif model_format(folder) is not None:
        yield ModelTarget(model_name(folder), _config_at(config, folder))
    elif versions := [each for each in _versions(folder) if model_format(each) is not None]:
        yield ModelTarget(folder.name, _config_at(config, versions[0]))
    elif folder.is_dir() and (models := list(_repository_targets(folder, config))):
        yield from models
    elif not folder.is_dir():
        raise SluiceError(ErrorCode.NOT_FOUND, f"{path} is no folder; a MODEL is one, or ORG/NAME of the hub")
    else:
        raise SluiceError(
            ErrorCode.NOT_FOUND,
            f"{path} is neither a model's folder (config.json with weights, an IR, a compiled engine) nor a repository "
            "with a language model in it",
        )


def _config_at(config: EngineConfig, folder: Path, runtime: Runtime | None = None) -> EngineConfig:
    return msgspec.structs.replace(config, model_path=str(folder), runtime=runtime or config.runtime)


def _hub_target(name: str, config: EngineConfig) -> ModelTarget:
    folder = find_cached(name)
    if folder is None:
        text = "it is not in the hub's local cache, so nothing is known of it"
        return ModelTarget(name, note(name, text, f"`sluice serve {name}` downloads it"))
    return ModelTarget(model_name(folder), _config_at(config, folder))


def _versions(folder: Path) -> list[Path]:
    """Return the folder's versions, newest first."""
    return [folder / str(version) for version in sorted(list_versions(folder), reverse=True)] if folder.is_dir() else []


def _repository_targets(repository: Path, config: EngineConfig) -> Iterator[ModelTarget]:
    registry = BackendRegistry()
    for folder in sorted(child for child in repository.iterdir() if child.is_dir()):
        try:
            candidate = read_candidate(folder.name, ModelFolder(folder), registry, is_strict=False)
        except SluiceError:
            continue  # `sluice repository check` says what is wrong with it
        if isinstance(registry.find(candidate.config.backend), LlmBackend) and candidate.versions:
            source = ModelSource(folder, max(candidate.versions), candidate.config)
            yield _source_target(source, config)


def _source_target(source: ModelSource, config: EngineConfig) -> ModelTarget:
    try:
        setup = set_up(source, lambda path, runtime: _config_at(config, Path(path), runtime))
    except SluiceError as error:
        return ModelTarget(source.name, fail(source.name, error.message, "see `sluice repository check`"))
    return ModelTarget(source.name, setup.engine, setup.checkpoint.tokenizer, setup.choice)


_WEIGHTS = {
    ModelFormat.HUGGINGFACE: ("*.safetensors", "*.bin"),
    ModelFormat.OPENVINO_IR: ("openvino_model.bin",),
    ModelFormat.TENSORRT_LLM_CHECKPOINT: ("rank*.safetensors",),
    ModelFormat.TENSORRT_LLM_ENGINE: ("*.engine",),
}
_BYTES = {"float32": 4, "float": 4, "float8_e4m3fn": 1, "fp8": 1, "nvfp4": 0.5625, "int8": 1, "u8": 1, "auto": 2, "": 2}
"""Bytes of a value by type. nvfp4 has 4 bits for a value, and a scale of 8 bits for each 16 values."""
_DEFAULT_BYTES = 2

Fields = dict[str, Any]


def read_model(name: str, folder: Path, tokenizer: Path | None = None, *, num_gpus: int = 1) -> ModelFacts:
    """Read the facts of the model in `folder`, which is to run on `num_gpus` GPUs.

    `tokenizer` is the tokenizer's folder, where it is not the model's. Raises SluiceError NOT_FOUND where the folder
    holds no model, INVALID where its config.json cannot be read.
    """
    kind = model_format(folder)
    if kind is None:
        raise SluiceError(ErrorCode.NOT_FOUND, f"{folder} holds no model: it has neither config.json nor an IR")
    root = _read_json(folder / "config.json")
    config = _decoder_fields(root)
    build = root.get("build_config") or {}
    manifest = _read_manifest(folder)
    mapping = config.get("mapping") or {}
    tokens = tokenizer_file(tokenizer or folder)
    return ModelFacts(
        name=name,
        path=folder,
        format=kind,
        architecture=str(config.get("architecture") or (config.get("architectures") or [config.get("model_type")])[0]),
        dtype=_dtype(config),
        quantization=_quantization(folder, config),
        size=_size(folder, kind, config, build),
        has_tokenizer=tokens is not None,
        num_gpus=int(mapping.get("world_size") or num_gpus),
        built_by=str(root.get("version") or "") if kind is ModelFormat.TENSORRT_LLM_ENGINE else "",
        built_for=_capability(manifest.get("compute_capability")),
        transformers_version=str(root.get("transformers_version") or ""),
        problems={spec.runtime: text for spec in runtimes_for(kind) if (text := spec.find_problem(folder))},
        manifest=manifest,
        tokenizer_sha256="" if tokens is None else sha256_of(tokens),
    )


def _read_json(path: Path) -> Fields:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=Fields)
    except (ValueError, RecursionError, OSError) as error:
        raise SluiceError(ErrorCode.INVALID, f"cannot read {path}: {error}") from None


def _decoder_fields(root: Fields) -> Fields:
    """Return config.json with the decoder's fields on top: compiled engines and multimodal models nest them."""
    for key in ("pretrained_config", "text_config"):
        if isinstance(root.get(key), dict):
            return {**root, **root[key]}
    return root


def _dtype(config: Fields) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "")


def _quantization(folder: Path, config: Fields) -> str:
    """Return the name that the quantization tool gave its method; "none" for weights as they were trained."""
    by_modelopt = (_read_json(folder / "hf_quant_config.json").get("quantization") or {}).get("quant_algo")
    by_tensorrt = (config.get("quantization") or {}).get("quant_algo")
    by_transformers = (config.get("quantization_config") or {}).get("quant_method")
    by_sluice = next((each for each in QUANTIZATIONS if (folder / compressed_file(each)).is_file()), None)
    return str(by_modelopt or by_tensorrt or by_transformers or by_sluice or "none").lower()


def _size(folder: Path, kind: ModelFormat, config: Fields, build: Fields) -> ModelSize:
    longest = build.get("max_seq_len") or config.get("max_position_embeddings")
    return ModelSize(_weight_bytes(folder, _WEIGHTS[kind]), _kv_bytes_per_token(config), longest)


def _weight_bytes(folder: Path, patterns: Iterable[str]) -> int:
    """Sum the files of the first pattern that matches: a folder may hold the same weights in two formats."""
    for pattern in patterns:
        if sizes := [file.stat().st_size for file in folder.glob(pattern)]:
            return sum(sizes)
    return 0


def _kv_bytes_per_token(config: Fields) -> int | None:
    """Return the bytes of keys and values of all layers. A latent cache (DeepSeek's) has one vector for both."""
    layers = config.get("num_hidden_layers")
    if not layers:
        return None
    width = _BYTES.get(_dtype(config).removeprefix("torch."), _DEFAULT_BYTES)
    if latent := config.get("kv_lora_rank"):
        return int(layers * (latent + config.get("qk_rope_head_dim", 0)) * width)
    heads = config.get("num_attention_heads")
    head_dim = config.get("head_dim") or config.get("head_size") or (heads and config.get("hidden_size", 0) // heads)
    kv_heads = config.get("num_key_value_heads") or heads
    return int(2 * layers * kv_heads * head_dim * width) if kv_heads and head_dim else None


def cache_width(dtype: str, model_dtype: str) -> float:
    """Return the bytes of a cached value in `dtype`, over those in the model's own type."""
    model_width = _BYTES.get(model_dtype.removeprefix("torch."), _DEFAULT_BYTES)
    return 1.0 if dtype == "auto" else _BYTES.get(dtype, _DEFAULT_BYTES) / model_width


def _read_manifest(folder: Path) -> Fields:
    """Read the build manifest, which lies in the model's folder or, for a version, in the folder above."""
    return _read_json(folder / MANIFEST) or _read_json(folder.parent / MANIFEST)


def _capability(text: Any) -> ComputeCapability | None:
    major, _, minor = str(text or "").partition(".")
    return ComputeCapability(int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
