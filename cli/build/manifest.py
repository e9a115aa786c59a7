"""`sluice-build.json`, the manifest of a build: source, settings, versions and commands."""

import hashlib
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sluice import __version__
from sluice.cli.build.checkpoint_files import CONFIG
from sluice.cli.build.options import BuildOptions
from sluice.cli.build.plan import BuildPaths, BuildPlan
from sluice.cli.build.source import BuildSource, SourceCheckpoint
from sluice.cli.build.steps import ToolStep
from sluice.cli.gpus import read_driver
from sluice.engine.model_folder import ModelFormat
from sluice.gateway.checkpoint import is_hub_id
from sluice.pipelines.text.transformers_tokenizer import TOKENIZER_FILES

MANIFEST = "sluice-build.json"
FORMAT = 1
"""Version of the format. It is raised when a field changes its meaning."""


def make_manifest(
    options: BuildOptions,
    source: BuildSource,
    checkpoint: SourceCheckpoint,
    plan: BuildPlan,
    paths: BuildPaths,
    tools: Iterable[ToolStep],
) -> dict[str, Any]:
    """Return the manifest of the model that was built in `paths`.

    `source` is what CHECKPOINT names, `checkpoint` what was fetched of it, and `tools` are the commands that were run.
    """
    is_engine = plan.format is ModelFormat.TENSORRT_LLM_ENGINE
    tokenizer = _tokenizer_file(paths.models / plan.names.model)
    return {
        "format": FORMAT,
        "built_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "sluice_version": __version__,
        "name": plan.names.model,
        "models": list(plan.names.all),
        "runtime": plan.runtime.value,
        "runtime_version": plan.builder.library_version(options),
        "model_format": plan.format.value,
        "compute_capability": _compute_capability() if is_engine and options.is_compiled else None,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "quantization": options.quantization if options.quantization != "none" else checkpoint.quantized_by or "none",
        "dtype": options.dtype.value,
        "kv_cache_dtype": options.kv_cache_dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_beam_width": options.max_beam_width,
        "source": _source_fields(options, source, checkpoint),
        "tokenizer_file": tokenizer.name if tokenizer else None,
        "tokenizer_sha256": _sha256(tokenizer) if tokenizer else None,
        "commands": [paths.to_published(tool.script()) for tool in tools],
    }


def write_manifest(fields: dict[str, Any], model: Path) -> None:
    (model / MANIFEST).write_text(json.dumps(fields, indent=2) + "\n")


def _source_fields(options: BuildOptions, source: BuildSource, checkpoint: SourceCheckpoint) -> dict[str, Any]:
    """Describe the source. `revision` is the commit of a hub model, which names its folder in the hub's cache."""
    is_from_hub = not Path(options.checkpoint).exists() and is_hub_id(options.checkpoint)
    config = checkpoint.path / CONFIG
    return {
        "checkpoint": options.checkpoint if is_from_hub else str(Path(options.checkpoint).absolute()),
        "kind": source.format.value if isinstance(source, SourceCheckpoint) else "nemo",
        "revision": checkpoint.path.name if is_from_hub else None,
        "config_sha256": _sha256(config) if config.is_file() else None,
    }


def _tokenizer_file(model: Path) -> Path | None:
    folders = (model / "1", model / "tokenizer")
    return next((folder / name for folder in folders for name in TOKENIZER_FILES if (folder / name).is_file()), None)


def _sha256(file: Path) -> str:
    with file.open("rb") as read:
        return hashlib.file_digest(read, "sha256").hexdigest()


def _compute_capability() -> str | None:
    """Return the compute capability of the first GPU, as "9.0"; None where NVML does not report it."""
    gpus = read_driver().gpus
    return str(gpus[0].capability) if gpus and gpus[0].capability else None
