"""The checkpoint to serve, as options name it: `sluice.pipelines.llm.checkpoint`, whose errors are those of options
here."""

from pathlib import Path

from sluice.gateway.options.option import as_option_error
from sluice.pipelines.llm import checkpoint
from sluice.pipelines.llm.checkpoint import find_cached, is_hub_id, model_name

__all__ = ["download_from_hub", "find_cached", "find_checkpoint", "is_hub_id", "model_name", "served_name"]


def find_checkpoint(
    path: str | None, option: str = "MODEL", engine_python: str | None = None, *, has_engine: bool = True
) -> Path:
    """Return the folder of a loadable checkpoint at `path`, the value of `option`. Raises OptionError."""
    with as_option_error():
        return checkpoint.find_checkpoint(path, option, engine_python, has_engine=has_engine)


def download_from_hub(hub_id: str) -> Path:
    """Return the folder of a model of the hub in the local cache. Raises OptionError."""
    with as_option_error():
        return checkpoint.download_from_hub(hub_id)


def served_name(option: str | None, found: Path) -> str:
    """Return the name that clients use: `--served-model-name`, or else the checkpoint's own."""
    return option or model_name(found)
