"""Finds the folder of the checkpoint to serve, and the name to serve it under."""

from pathlib import Path

from gateway.bundled import BUNDLED_MODEL, models_folder
from gateway.hub import download, is_hub_id, name_of_snapshot
from gateway.options import ConfigError


def find_checkpoint(path: str | None, option: str = "MODEL") -> Path:
    """The folder with `config.json` that `path`, given as `option`, means; None means the bundled model.

    A model folder laid out as Triton's (one numbered folder a version) stands for its highest version. What is
    no folder and reads like a name on the Hugging Face hub is downloaded from there, unless it was before.
    Raises ConfigError where there is no checkpoint.
    """
    folder = models_folder() / BUNDLED_MODEL if path is None else Path(path)
    if path is not None and not folder.exists() and is_hub_id(path):
        folder = download(path)
    for candidate in (folder, *_versions(folder)):
        if (candidate / "config.json").is_file():
            return candidate
    what = "has no config.json, so it is no HuggingFace checkpoint" if folder.is_dir() else "is no folder"
    raise ConfigError(
        f"{option} must be the folder of a HuggingFace checkpoint or OpenVINO IR, or ORG/NAME on the Hugging Face hub, "
        f"got {str(folder)!r}, which {what}"
    )


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
