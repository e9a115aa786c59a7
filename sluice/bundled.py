"""The folders that come with Sluice: its models and its documentation."""

from pathlib import Path

BUNDLED_MODEL = "rill"
"""Name of the language model among them."""


def bundled_folder(name: str) -> Path:
    """Return a folder: inside the package `gateway` in an installed Sluice, beside the packages in a checkout."""
    root = Path(__file__).resolve().parent.parent
    installed = root / "gateway" / name
    return installed if installed.is_dir() else root / name


def models_folder() -> Path:
    """Return the folder of the models."""
    return bundled_folder("models")
