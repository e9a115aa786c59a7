"""The repository API over HTTP and gRPC alike: the models of the repository, and the LoRA adapters of language models.

An adapter is loaded by its name with the parameter `lora_path`, its folder, and `base_model_name` where MODEL:NAME does
not say its model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.api.v2.server import V2Server
from sluice.gateway.calls import is_visible, note_model
from sluice.gateway.front.path_masking import hide_paths
from sluice.serving.backend import LoadOverrides
from sluice.serving.repository.managed_model import IndexEntry

LORA_PATH, BASE_MODEL = "lora_path", "base_model_name"
ADAPTER_PARAMETERS = (LORA_PATH, BASE_MODEL)
_MAX_CONFIG_CHARS = 1 << 18
"""Longest configuration of a load request: the parser holds up every other request."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The parameters of a load request. With a `lora_path` the request loads an adapter."""

    overrides: LoadOverrides | None = None
    lora_path: str | None = None
    base_model: str = ""


def build_load(
    server: V2Server, config_json: str | None, files: Sequence[tuple[str, bytes]], adapter: Mapping[str, str]
) -> LoadRequest:
    """Return a load request of its parameters. Raises INVALID for those that do not go together, FORBIDDEN for files
    where the server takes none."""
    if config_json is not None and len(config_json) > _MAX_CONFIG_CHARS:
        text = f"load parameter 'config' has {len(config_json)} characters; at most {_MAX_CONFIG_CHARS} are taken"
        raise SluiceError(ErrorCode.INVALID, text)
    has_overrides = config_json is not None or bool(files)
    if adapter and (has_overrides or LORA_PATH not in adapter):
        text = f"a LoRA adapter is loaded with '{LORA_PATH}' and, if its name does not say its model, '{BASE_MODEL}'"
        raise invalid(LORA_PATH, f"{text}; neither goes with 'config' or files")
    if files and not server.takes_model_files:
        text = (
            f"load parameter 'file:{files[0][0]}' is refused: a model's files may be code that the server would run, "
            "and it takes them from clients only with --allow-model-file-override=true"
        )
        raise SluiceError(ErrorCode.FORBIDDEN, text)
    overrides = LoadOverrides(config_json, tuple(files)) if has_overrides else None
    return LoadRequest(overrides, adapter.get(LORA_PATH), adapter.get(BASE_MODEL, ""))


async def load_model(server: V2Server, name: str, request: LoadRequest) -> None:
    """Load or reload a model or an adapter. Raises SluiceError."""
    if request.lora_path is None:
        note_model(name)
        await server.repository.load(name, request.overrides)
        await server.settle()
    else:
        await server.adapters.load(name, request.lora_path, request.base_model, replaces=True)


async def unload_model(server: V2Server, name: str, base_model: str, unload_dependents: bool) -> None:
    """Unload a model; or an adapter, where `base_model` has it or no model has this name. Raises SluiceError."""
    is_model = any(model.name == name for model in server.repository.models())
    if base_model or (not is_model and server.adapters.is_known(name)):
        await server.adapters.unload(name, base_model)
    else:
        note_model(name)
        await server.repository.unload(name, unload_dependents)
        await server.settle()


async def index_rows(server: V2Server, ready_only: bool) -> list[dict[str, str]]:
    """Read the repository, and return every model, or those that are ready, and every adapter."""
    await server.repository.refresh()
    models = (entry for entry in server.repository.index(ready_only) if is_visible(entry.name))
    adapters = (entry for entry in server.adapters.index() if is_visible(*entry.name.rpartition(":")[::2]))
    return [index_row(entry) for entry in (*models, *adapters)]


def index_row(entry: IndexEntry) -> dict[str, str]:
    """Return a row of the repository index; a model that was never loaded has its name alone."""
    if entry.state is None:
        return {"name": entry.name}
    row = {"name": entry.name, "version": str(entry.version), "state": entry.state.value}
    return {**row, "reason": hide_paths(entry.reason)} if entry.reason else row
