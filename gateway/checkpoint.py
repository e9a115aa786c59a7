"""Finds the folder of the checkpoint to serve, and the name to serve it under."""

from pathlib import Path

from engine.config import Runtime
from engine.model_folder import ModelFormat, model_format
from engine.runtimes import RUNTIMES
from gateway.bundled import BUNDLED_MODEL, models_folder
from gateway.hub import download, is_hub_id, name_of_snapshot
from gateway.options.option import ConfigError

_TENSORRT_LLM = RUNTIMES[Runtime.TENSORRT_LLM]
_ONLY_TENSORRT_LLM = {
    ModelFormat.TENSORRT_LLM_ENGINE: "a compiled engine of TensorRT-LLM",
    ModelFormat.TENSORRT_LLM_CHECKPOINT: "a checkpoint converted for TensorRT-LLM",
}
"""Formats that no other runtime reads, in words."""


def find_checkpoint(path: str | None, option: str = "MODEL", engine_python: str | None = None) -> Path:
    """The folder that `path`, given as `option`, means, of a model that can be loaded; None means the bundled model.

    A model folder laid out as Triton's (one numbered folder a version) stands for its highest version. What is
    no folder and reads like a name on the Hugging Face hub is downloaded from there, unless it was before.
    `engine_python` is the engine's, where that has one of its own.
    Raises ConfigError where there is no checkpoint, or one that only TensorRT-LLM runs where that is not installed.
    """
    folder = models_folder() / BUNDLED_MODEL if path is None else Path(path)
    if path is not None and not folder.exists() and is_hub_id(path):
        folder = download(path)
    for candidate in (folder, *_versions(folder)):
        if (candidate / "config.json").is_file():
            return _loadable(candidate, option, engine_python)
    raise ConfigError(
        f"{option} must be the folder of a HuggingFace checkpoint or OpenVINO IR, or ORG/NAME on the Hugging Face hub, "
        f"got {str(folder)!r}, which {_what_is_missing(folder)}"
    )


def _loadable(folder: Path, option: str, engine_python: str | None) -> Path:
    found = model_format(folder)
    if found is not None and found in _ONLY_TENSORRT_LLM and not _TENSORRT_LLM.is_installed(engine_python):
        raise ConfigError(
            f"{option} must be a model for a runtime that is installed here, got {str(folder)!r}, "
            f"{_ONLY_TENSORRT_LLM[found]}: {_TENSORRT_LLM.remedy}, or give the HuggingFace checkpoint that it was made "
            "of"
        )
    return folder


def _what_is_missing(folder: Path) -> str:
    if not folder.is_dir():
        return "is no folder"
    if any(folder.glob("*.engine")):
        return "has compiled engines, but not the config.json that they were built with"
    return "has no config.json, so it is no HuggingFace checkpoint"


def served_name(given: str | None, checkpoint: Path) -> str:
    """What clients ask for: `--served-model-name`, where it is given."""
    return given or model_name(checkpoint)


def model_name(checkpoint: Path) -> str:
    """What a checkpoint is called: its folder's name, or its model's where the folder is a version or a download."""
    folder = checkpoint.resolve()
    downloaded = name_of_snapshot(folder)
    if downloaded is not None:
        return downloaded
    return folder.parent.name if folder.name.isdecimal() else folder.name


def _versions(folder: Path) -> list[Path]:
    """Numbered subfolders, highest first."""
    if not folder.is_dir():
        return []
    numbered = [child for child in folder.iterdir() if child.name.isdecimal() and child.is_dir()]
    return sorted(numbered, key=lambda child: int(child.name), reverse=True)
