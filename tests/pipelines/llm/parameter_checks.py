"""Checks of one parameter of config.pbtxt over the command line's options `given`."""

from typing import Any

import msgspec
import pytest

from sluice.engine.config import EngineConfig
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.parameters import apply_parameters


def changed(given: EngineConfig, config: EngineConfig) -> dict[str, Any]:
    """Return the fields of `config` that differ from those given."""
    before, after = msgspec.structs.asdict(given), msgspec.structs.asdict(config)
    return {name: value for name, value in after.items() if value != before[name]}


def different(given: EngineConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields` without those that were given anyway."""
    return {name: value for name, value in fields.items() if value != getattr(given, name)}


def check_fields(given: EngineConfig, key: str, text: str, fields: dict[str, Any]) -> None:
    config, notes = apply_parameters(given, "m", {key: text})
    assert (changed(given, config), notes) == (different(given, fields), [])


def check_fields_and_note(given: EngineConfig, key: str, text: str, fields: dict[str, Any], words: str) -> None:
    config, (note,) = apply_parameters(given, "m", {key: text})
    assert changed(given, config) == different(given, fields)
    assert note.startswith(f"{key}: ")
    assert words in note


def check_refused(given: EngineConfig, key: str, text: str, words: str) -> None:
    with pytest.raises(SluiceError, match=f"parameter '{key}' of model 'm' .*{words}") as caught:
        apply_parameters(given, "m", {key: text})
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, key)
