"""The folders that come with Sluice: its models and its documentation."""

from pathlib import Path

BUNDLED_MODEL = "rill"
"""Name of the language model among them."""


def bundled_folder(name: str) -> Path:
    """Return a folder: inside the package, which has it by a link in a checkout."""
    return (Path(__file__).parent / name).resolve()


def models_folder() -> Path:
    """Return the folder of the models."""
    return bundled_folder("models")
