"""The membership file: the engines that a gateway may send requests to (`sluice serve --engines FILE`)."""

import os
from pathlib import Path

import msgspec
import yaml

from sluice.engine.fleet.membership.file import EngineEntry, EnginesFile
from sluice.engine.yaml_text import load_yaml


def write_members(path: Path, content: EnginesFile) -> bool:
    """Write the file, so that a reader finds the old list or the new one, whole. Returns whether it has changed. Raises
    OSError."""
    fields = msgspec.to_builtins(content)
    text = msgspec.yaml.encode(fields if content.endpoints else {**fields, "engines": fields.get("engines", [])})
    if path.is_file() and path.read_bytes() == text:
        return False
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(text)
    fresh.replace(path)
    return True


def read_members(path: Path) -> tuple[EngineEntry, ...]:
    """Return the engines of a file; none where there is no file. Raises ValueError for one that cannot be read."""
    try:
        return msgspec.convert(load_yaml(path.read_bytes()), EnginesFile).engines
    except FileNotFoundError:
        return ()
    except (yaml.YAMLError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path} must have a list `engines`, each with name, address and weight: {error}") from None
