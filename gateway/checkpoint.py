"""Finds the folder of the checkpoint to serve, and the name to serve it under."""

from pathlib import Path

from gateway.options import ConfigError

BUNDLED_MODEL = "rill"


def find_checkpoint(path: str | None) -> Path:
    """The folder with `config.json` that `path` means; None means the bundled model.

    A model folder laid out as Triton's (one numbered folder a version) stands for its highest version.
    Raises ConfigError where there is no checkpoint.
    """
    folder = _bundled() if path is None else Path(path)
    for candidate in (folder, *_versions(folder)):
        if (candidate / "config.json").is_file():
            return candidate
    what = "has no config.json, so it is no HuggingFace checkpoint" if folder.is_dir() else "is no folder"
    raise ConfigError(f"MODEL must be the folder of a HuggingFace checkpoint, got {str(folder)!r}, which {what}")


def model_name(checkpoint: Path) -> str:
    """What a checkpoint is called: its folder's name, or its model's where the folder is a version."""
    folder = checkpoint.resolve()
    return folder.parent.name if folder.name.isdecimal() else folder.name


def _bundled() -> Path:
    """In an installed Sluice the models lie in this package, in a checkout beside it."""
    here = Path(__file__).resolve().parent
    installed = here / "models" / BUNDLED_MODEL
    return installed if installed.is_dir() else here.parent / "models" / BUNDLED_MODEL


def _versions(folder: Path) -> list[Path]:
    """Numbered subfolders, highest first."""
    if not folder.is_dir():
        return []
    numbered = [child for child in folder.iterdir() if child.name.isdecimal() and child.is_dir()]
    return sorted(numbered, key=lambda child: int(child.name), reverse=True)
