"""Reads the facts of a model from its folder, without loading it."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from sluice.cli.doctor.facts import ModelFacts, ModelSize
from sluice.cli.gpus import ComputeCapability
from sluice.engine.model_folder import ModelFormat, model_format
from sluice.engine.models.weights.files import QUANTIZATIONS, compressed_file
from sluice.engine.runtimes import runtimes_for
from sluice.errors import ErrorCode, SluiceError

MANIFEST = "sluice-build.json"
"""The file that `sluice build` writes beside config.pbtxt."""
TOKENIZER = "tokenizer.json"
_TOKENIZERS = (TOKENIZER, "tokenizer.model", "tekken.json", "vocab.json")
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
    return ModelFacts(
        name=name,
        path=folder,
        format=kind,
        architecture=str(config.get("architecture") or (config.get("architectures") or [config.get("model_type")])[0]),
        dtype=_dtype(config),
        quantization=_quantization(folder, config),
        size=_size(folder, kind, config, build),
        has_tokenizer=_has_tokenizer(tokenizer or folder),
        num_gpus=int(mapping.get("world_size") or num_gpus),
        built_by=str(root.get("version") or "") if kind is ModelFormat.TENSORRT_LLM_ENGINE else "",
        built_for=_capability(manifest.get("compute_capability")),
        transformers_version=str(root.get("transformers_version") or ""),
        problems={spec.runtime: text for spec in runtimes_for(kind) if (text := spec.find_problem(folder))},
        manifest=manifest,
        tokenizer_sha256=_sha256((tokenizer or folder) / TOKENIZER),
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


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZERS)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def _read_manifest(folder: Path) -> Fields:
    """Read the build manifest, which lies in the model's folder or, for a version, in the folder above."""
    return _read_json(folder / MANIFEST) or _read_json(folder.parent / MANIFEST)


def _capability(text: Any) -> ComputeCapability | None:
    major, _, minor = str(text or "").partition(".")
    return ComputeCapability(int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
