"""`sluice-build.json`: what was built of what, and with which versions."""

import hashlib
import json
from sluice import __version__
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.config import Runtime
from engine.model_folder import ModelFormat
from cli.build.arguments import Options
from cli.build.files import CONFIG
from cli.build.plan import Places, Plan
from cli.build.source import Checkpoint, Source
from cli.build.steps import Tool
from cli.build.tensorrt_llm import installed_version, library_version
from gateway.hub import is_hub_id
from pipelines.text.tokenizer import TOKENIZER_FILES

MANIFEST = "sluice-build.json"
FORMAT = 1
"""Raise it when a field changes its meaning."""


def manifest(
    options: Options, asked: Source, source: Checkpoint, plan: Plan, places: Places, tools: Iterable[Tool]
) -> dict[str, Any]:
    """Of the model that is built at `places`, by `tools` among others."""
    is_tensorrt = plan.runtime is Runtime.TENSORRT_LLM
    is_engine = plan.format is ModelFormat.TENSORRT_LLM_ENGINE
    tokenizer = _tokenizer_file(places.root / plan.names.model)
    return {
        "format": FORMAT,
        "built_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "sluice_version": __version__,
        "name": plan.names.model,
        "models": list(plan.names.all),
        "runtime": plan.runtime.value,
        "runtime_version": _tensorrt_llm_version(options) if is_tensorrt else version("openvino"),
        "model_format": plan.format.value,
        "compute_capability": _compute_capability() if is_engine and options.is_compiled else None,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "quantization": options.quantization if options.quantization != "none" else source.quantized_by or "none",
        "dtype": options.dtype.value,
        "kv_cache_dtype": options.kv_cache_dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_beam_width": options.max_beam_width,
        "source": _source(options, asked, source),
        "tokenizer_file": tokenizer.name if tokenizer else None,
        "tokenizer_sha256": _sha256(tokenizer) if tokenizer else None,
        "commands": [places.lasting(tool.script()) for tool in tools],
    }


def write_manifest(fields: dict[str, Any], model: Path) -> None:
    (model / MANIFEST).write_text(json.dumps(fields, indent=2) + "\n")


def _source(options: Options, asked: Source, source: Checkpoint) -> dict[str, Any]:
    """`revision` is the hub's commit, where it was downloaded from there: the folder's name in its cache."""
    is_of_hub = not Path(options.checkpoint).exists() and is_hub_id(options.checkpoint)
    config = source.path / CONFIG
    return {
        "checkpoint": options.checkpoint if is_of_hub else str(Path(options.checkpoint).absolute()),
        "kind": asked.format.value if isinstance(asked, Checkpoint) else "nemo",
        "revision": source.path.name if is_of_hub else None,
        "config_sha256": _sha256(config) if config.is_file() else None,
    }


def _tensorrt_llm_version(options: Options) -> str | None:
    """What made the engines, or was there; None where a checkpoint was put together without it."""
    return str(library_version(options)) if options.is_compiled else installed_version()


def _tokenizer_file(model: Path) -> Path | None:
    folders = (model / "1", model / "tokenizer")
    return next((folder / name for folder in folders for name in TOKENIZER_FILES if (folder / name).is_file()), None)


def _sha256(file: Path) -> str:
    with file.open("rb") as read:
        return hashlib.file_digest(read, "sha256").hexdigest()


def _compute_capability() -> str | None:
    """Of the first GPU, as "9.0"; None where NVML does not tell."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0))
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return f"{major}.{minor}"
