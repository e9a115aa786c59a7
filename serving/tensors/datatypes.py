"""The element types of the v2 protocol, with their names in the protocol, in config.pbtxt and in numpy."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class DataType:
    """An element type. `itemsize` is in bytes; 0 for BYTES, whose elements differ in length."""

    name: str
    config_name: str
    dtype: np.dtype
    itemsize: int


def _data_type(name: str, scalar: type, config_name: str | None = None) -> DataType:
    dtype = np.dtype(scalar)
    return DataType(name, config_name or f"TYPE_{name}", dtype, 0 if name == "BYTES" else dtype.itemsize)


BYTES = _data_type("BYTES", np.object_, "TYPE_STRING")
"""Byte strings; in numpy an object array of `bytes`."""

DATA_TYPES: dict[str, DataType] = {
    data_type.name: data_type
    for data_type in (
        _data_type("BOOL", np.bool_),
        _data_type("UINT8", np.uint8),
        _data_type("UINT16", np.uint16),
        _data_type("UINT32", np.uint32),
        _data_type("UINT64", np.uint64),
        _data_type("INT8", np.int8),
        _data_type("INT16", np.int16),
        _data_type("INT32", np.int32),
        _data_type("INT64", np.int64),
        _data_type("FP16", np.float16),
        _data_type("FP32", np.float32),
        _data_type("FP64", np.float64),
        _data_type("BF16", ml_dtypes.bfloat16),
        BYTES,
    )
}
"""Element types by their names in the protocol."""

_BY_CONFIG_NAME = {data_type.config_name: data_type for data_type in DATA_TYPES.values()}
_BY_DTYPE = {data_type.dtype: data_type for data_type in DATA_TYPES.values()}


def of_config(config_name: str) -> DataType | None:
    """Return the type that config.pbtxt calls `config_name` (TYPE_FP32 …), else None."""
    return _BY_CONFIG_NAME.get(config_name)


def of_numpy(dtype: np.dtype) -> DataType | None:
    """Return the type of an array of `dtype`, else None. Strings of either kind (S, U) are BYTES."""
    if dtype.kind in "SU":
        return BYTES
    return _BY_DTYPE.get(dtype.newbyteorder("=") if dtype.kind not in "OV" else dtype)
