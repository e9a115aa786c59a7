"""Reads LoRA adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sluice.engine.arrays import FloatArray
from sluice.engine.models.weights.mapped import FLOAT_TYPES, StoredTensor, map_tensors
from sluice.errors import ErrorCode, SluiceError, invalid

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_TENSOR = re.compile(
    r"(?:base_model\.model\.)?"
    r"(?:|model\.|language_model\.|language_model\.model\.|model\.language_model\.|gpt_neox\.|transformer\.)"
    r"(?P<module>(?:layers|h)\.\d+\..+)\.lora_(?P<side>[AB])(?:\.default)?\.weight"
)
"""The name of a stored matrix, with each prefix that a text model's layers have, alone or within a model of several."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights, or their beginnings, with which PEFT changes the base model's own weights too."""
_REFUSED = {
    "use_dora": "DoRA scales the columns of the base weights",
    "lora_bias": "biases of the adapter",
    "modules_to_save": "whole modules in the place of the model's",
    "trainable_token_indices": "embeddings of its own for some tokens",
    "layer_replication": "layers that are built several times",
    "target_parameters": "parameters that are no linear layers",
    "alora_invocation_tokens": "an adapter that begins at certain tokens (aLoRA)",
    "use_qalora": "groups of the input (QALoRA)",
    "megatron_config": "layers of Megatron",
}
"""Fields of adapter_config.json that must be absent, empty or false, and what they ask for."""
_MAX_VALUE = 3.3e38
"""Beyond it a value is infinite in bf16."""

Matrices = tuple[FloatArray, FloatArray]
"""A [rank, features in] and B [features out, rank], the latter multiplied by the adapter's scale."""


def read_adapter(name: str, folder: Path, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Matrices]:
    """Return the matrices of the adapter in `folder` by the projections of `shapes`, which has their features out and
    in. Raises SluiceError: NOT_FOUND for a missing file, UNIMPLEMENTED for what is not LoRA alone, INVALID for a
    damaged adapter and for one of another model. Its message begins with `name`."""
    try:
        return _read(folder, shapes)
    except SluiceError as error:
        raise SluiceError(error.code, f"LoRA adapter {name}: {error.message}", param="lora_modules") from error


def stack_matrices(
    module: str, shape: tuple[int, int], adapters: Sequence[tuple[Mapping[str, Matrices], int]], num_before: int = 0
) -> Matrices:
    """Return A and B of a projection for `adapters` with their ranks, behind `num_before` ranks of nobody. An adapter
    that leaves the projection alone, or has a lower rank there, has zeros."""
    num_out, num_in = shape
    num_ranks = num_before + sum(rank for _, rank in adapters)
    a, b = np.zeros((num_ranks, num_in), np.float32), np.zeros((num_out, num_ranks), np.float32)
    begin = num_before
    for adapter, rank in adapters:
        if module in adapter:
            own_a, own_b = adapter[module]
            a[begin : begin + len(own_a)] = own_a
            b[:, begin : begin + len(own_a)] = own_b
        begin += rank
    return a, b


def _read(folder: Path, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Matrices]:
    config, path = read_config(folder / CONFIG_FILE), find_weights(folder)
    known = {_short(module): module for module in shapes}
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for tensor_name, tensor in map_tensors(path).items():
        found = _TENSOR.fullmatch(tensor_name)
        module = known.get(found["module"]) if found else None
        if found is None or module is None:
            kinds = ", ".join(dict.fromkeys(each.rsplit(".", 1)[1] for each in shapes))
            message = f"{path}: {tensor_name} is no matrix of a layer's linear projection; this model has {kinds}"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message)
        pairs.setdefault(module, {})[found["side"]] = tensor
    if not pairs:
        raise invalid("lora_modules", f"{path} has no tensors")
    return {module: _matrices(path, module, pair, shapes[module], config) for module, pair in pairs.items()}


def find_weights(folder: Path) -> Path:
    """Return the file of an adapter's matrices. Raises SluiceError NOT_FOUND."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        has_pickle = (folder / "adapter_model.bin").is_file()
        hint = "; adapter_model.bin is not read: save it with safe_serialization" if has_pickle else ""
        raise SluiceError(ErrorCode.NOT_FOUND, f"{folder} has no file {WEIGHTS_FILE}{hint}")
    return path


def _short(module: str) -> str:
    """Return a projection's name without the prefix of its text model."""
    return module.split(".", 1)[1]


def read_config(path: Path) -> dict[str, Any]:
    """Return an adapter_config.json. Raises SluiceError: NOT_FOUND for a missing file, UNIMPLEMENTED for what is not
    LoRA alone, INVALID for what is no JSON."""
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror}); an adapter is a folder that PEFT wrote"
        raise SluiceError(ErrorCode.NOT_FOUND, message) from error
    except (ValueError, RecursionError) as error:
        raise invalid("lora_modules", f"{path} is not a JSON object: {error}") from error
    if config.get("peft_type") != "LORA":
        message = f"{path}: peft_type must be LORA, got {config.get('peft_type')!r}"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message)
    for field, meaning in _REFUSED.items():
        if config.get(field):
            message = f"{path}: {field} must not be set, got {config[field]!r}: {meaning} are not supported"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message)
    if config.get("bias", "none") != "none":
        message = f"{path}: bias must be none, got {config['bias']!r}: the model's biases are not replaced"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message)
    initial = config.get("init_lora_weights")
    if isinstance(initial, str) and initial.startswith(_CHANGES_BASE):
        message = f"{path}: init_lora_weights {initial!r} changes the base model too; convert it to plain LoRA in PEFT"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message)
    return config


def _matrices(
    path: Path, module: str, pair: dict[str, StoredTensor], shape: tuple[int, int], config: dict[str, Any]
) -> Matrices:
    missing = [side for side in "AB" if side not in pair]
    if missing:
        raise invalid("lora_modules", f"{path} has no lora_{missing[0]} of {module}")
    rank = _option(config, module, "rank_pattern", "r")
    num_out, num_in = shape
    for side, expected in (("A", (rank, num_in)), ("B", (num_out, rank))):
        found = pair[side]
        if found.dtype not in FLOAT_TYPES:
            kinds = ", ".join(FLOAT_TYPES)
            raise invalid("lora_modules", f"{path}: lora_{side} of {module} must be {kinds}, got {found.dtype}")
        if found.shape != expected:
            message = f"must have shape {expected} by {CONFIG_FILE} and the model, got {found.shape}"
            raise invalid("lora_modules", f"{path}: lora_{side} of {module} {message}")
    alpha = _option(config, module, "alpha_pattern", "lora_alpha")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    a, b = pair["A"].floats(slice(None)), pair["B"].floats(slice(None)) * np.float32(scale)
    for side, values in (("A", a), ("B", b)):
        if not (np.abs(values) < _MAX_VALUE).all():  # nan too
            raise invalid("lora_modules", f"{path}: lora_{side} of {module} must be finite, and is not")
    return a, b


def _option(config: dict[str, Any], module: str, patterns: str, default: str) -> Any:
    """Return the value of the first pattern that matches `module`, as PEFT does, else that of the field `default`."""
    table = config.get(patterns) or {}
    if not isinstance(table, dict):
        raise invalid("lora_modules", f"{CONFIG_FILE}: {patterns} must be an object, got {table!r}")
    try:
        found = next((key for key in table if re.match(rf"(.*\.)?({key})$", module)), None)
    except re.error as error:
        raise invalid("lora_modules", f"{CONFIG_FILE}: {patterns} must have regular expressions: {error}") from error
    value = config.get(default) if found is None else table[found]
    kinds, what = ((int,), "a whole number") if default == "r" else ((int, float), "a number")
    if value is None or type(value) not in kinds or not 0 < value < _MAX_VALUE:
        where = default if found is None else f"{patterns}[{found!r}]"
        raise invalid("lora_modules", f"{CONFIG_FILE}: {where} must be {what} above 0, got {value!r}")
    return value
