"""What is built from: a checkpoint's folder, a model of the hub, or NeMo's."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from engine.model_folder import ModelFormat, model_format
from cli.build.failures import AskedError
from cli.build.files import CONFIG
from cli.build.nemo import NemoCheckpoint, read_nemo
from gateway.checkpoint import find_checkpoint, model_name
from gateway.checkpoint import download_from_hub, is_hub_id
from gateway.options.option import OptionError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with a model, which an earlier step may have yet to make."""

    path: Path
    format: ModelFormat
    name: str
    origin: str
    """As it was asked for."""
    config: dict[str, Any] = field(default_factory=dict)
    """Its config.json; empty where that is not there yet."""

    @property
    def description(self) -> str:
        return self.format.value.replace("_", " ")

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def quantized_by(self) -> str:
        """Who compressed its weights before: "" for nobody."""
        settings = self.config.get("quantization_config") or {}
        method = str(settings.get("quant_method", "")) if isinstance(settings, dict) else ""
        return method or ("modelopt" if (self.path / "hf_quant_config.json").is_file() else "")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub that is not here."""

    hub_id: str
    revision: str | None
    description: str = "model of the hub"

    @property
    def name(self) -> str:
        return self.hub_id.rpartition("/")[2]


Source = Checkpoint | HubModel | NemoCheckpoint


def find_source(text: str, *, is_dry: bool) -> Source:
    """What CHECKPOINT means. A model of the hub is downloaded, unless it is a dry run.

    Raises AskedError where there is nothing that could be built from.
    """
    path = Path(text)
    nemo = read_nemo(path)
    if nemo is not None:
        return nemo
    if not path.exists() and is_hub_id(text):
        if is_dry:
            hub_id, _, revision = text.partition("@")
            return HubModel(hub_id, revision or None)
        try:
            return checkpoint_at(download_from_hub(text), text)
        except OptionError as error:
            raise AskedError(str(error)) from None
    if path.is_dir() and model_format(path) is not None:
        return checkpoint_at(path, text)
    try:
        return checkpoint_at(find_checkpoint(text, "CHECKPOINT"), text)
    except OptionError as error:
        raise AskedError(
            f"{error}; a .nemo archive or a NeMo 2 checkpoint (context/ and weights/) will do too"
        ) from None


def checkpoint_at(folder: Path, origin: str) -> Checkpoint:
    """Raises AskedError for a folder without a model."""
    kind = model_format(folder)
    if kind is None:
        raise AskedError(f"{folder} holds no model: it has neither {CONFIG} nor an OpenVINO IR")
    return Checkpoint(folder, kind, model_name(folder), origin, _config_of(folder))


def _config_of(folder: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise AskedError(f"cannot read {folder / CONFIG}: {error}") from None
