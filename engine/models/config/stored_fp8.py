"""Checkpoints whose matrices are stored in 8-bit floats: which of them are understood, by `quantization_config`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sluice.errors import ErrorCode, SluiceError

_SECTION = "quantization_config"
BLOCK = 128
"""Rows and columns of a block that has a scale of its own."""
_FORMATS = ("float-quantized", "naive-quantized")
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")


def without_stored_fp8(fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of a config.json without the section on quantization, where that says that matrices are
    stored in float8_e4m3fn with scales of tensors, rows or blocks. Raises UNIMPLEMENTED where it says anything else."""
    section = fields.get(_SECTION)
    if not section:
        return fields
    problem = next(_problems(section), None) if isinstance(section, Mapping) else "it is no object"
    if problem is None:
        return {name: value for name, value in fields.items() if name != _SECTION}
    message = f"{path}: quantized checkpoints are not supported (this one: in quantization_config {problem}); "
    message += (
        f"supported: bf16, f16, f32, and float8_e4m3fn with a scale for each tensor, row or {BLOCK} x {BLOCK} block"
    )
    raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="model_path")


def _problems(section: Mapping[str, Any]) -> Iterator[str]:
    method = section.get("quant_method", "unknown")
    if method == "fp8":
        yield from _unlike(section, "fmt", (None, "e4m3", "float8_e4m3fn"))
        yield from _unlike(section, "weight_block_size", (None, [BLOCK, BLOCK]))
    elif method == "modelopt":
        yield from _unlike(section, "quant_algo", _ALGORITHMS)
    elif method == "compressed-tensors":
        yield from _unlike(section, "format", _FORMATS)
        yield from _unlike(section, "transform_config", (None, {}))
        groups = section.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            yield from _unlike_weights((group if isinstance(group, Mapping) else {}).get("weights"))
    else:
        yield f"quant_method is {method}"


def _unlike_weights(weights: object) -> Iterator[str]:
    if not isinstance(weights, Mapping):
        yield f"a group's weights are {weights!r}"
        return
    yield from _unlike(weights, "num_bits", (8,))
    yield from _unlike(weights, "type", ("float",))
    yield from _unlike(weights, "strategy", ("tensor", "channel", "block"))
    yield from _unlike(weights, "block_structure", (None, [BLOCK, BLOCK]))


def _unlike(section: Mapping[str, Any], name: str, known: tuple[object, ...]) -> Iterator[str]:
    if section.get(name) not in known:
        yield f"{name} is {section.get(name)!r}"
