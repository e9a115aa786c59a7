"""What an OpenVINO model takes and gives."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backends.arrays.completion import inputs_set_by_server
from serving.backends.arrays.signature import Signature, TensorSignature
from serving.tensors.datatypes import BYTES, DATA_TYPES, DataType
from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:
    from openvino import Model, Output

ELEMENT_TYPES: dict[str, DataType] = {
    "boolean": DATA_TYPES["BOOL"],
    "u8": DATA_TYPES["UINT8"],
    "u16": DATA_TYPES["UINT16"],
    "u32": DATA_TYPES["UINT32"],
    "u64": DATA_TYPES["UINT64"],
    "i8": DATA_TYPES["INT8"],
    "i16": DATA_TYPES["INT16"],
    "i32": DATA_TYPES["INT32"],
    "i64": DATA_TYPES["INT64"],
    "f16": DATA_TYPES["FP16"],
    "f32": DATA_TYPES["FP32"],
    "f64": DATA_TYPES["FP64"],
    "bf16": DATA_TYPES["BF16"],
    "string": BYTES,
}
"""By OpenVINO's names."""


@dataclass(frozen=True, slots=True)
class Names:
    """By which tensors are known to clients. A model's tensor may have several."""

    inputs: Collection[str] = ()
    outputs: Collection[str] = ()


def names_in(config: ModelConfig) -> Names:
    """Those that the configuration knows."""
    states = config.sequence_batching.state
    return Names(
        {each.name for each in config.input} | inputs_set_by_server(config),
        {each.name for each in config.output} | {each.output_name for each in states},
    )


def signature_of(model: "Model", names: Names, *, has_fixed_batch: bool = False) -> Signature:
    """A tensor that has several names goes by the one among `names`.

    `has_fixed_batch`: first dimensions are those of the batch, which is filled up. Raises SluiceError UNIMPLEMENTED
    for types that the protocol lacks.
    """
    inputs, outputs = _tensors(model.inputs, names.inputs), _tensors(model.outputs, names.outputs)
    if has_fixed_batch:
        inputs, outputs = _with_any_batch(inputs), _with_any_batch(outputs)
    return Signature(inputs, {}, outputs)


def _with_any_batch(tensors: dict[str, TensorSignature]) -> dict[str, TensorSignature]:
    return {name: replace(each, dims=(-1, *each.dims[1:])) for name, each in tensors.items()}


def _tensors(ports: "Sequence[Output]", wanted: Collection[str]) -> dict[str, TensorSignature]:
    named = [(_name_of(port, wanted), port) for port in ports]
    return {name: TensorSignature(name, _data_type(name, port), dims_of(port)) for name, port in named}


def _name_of(port: "Output", wanted: Collection[str]) -> str:
    names = [*sorted(port.get_names()), port.get_node().get_friendly_name()]
    return next((str(name) for name in names if name in wanted), str(names[0]))


def dims_of(port: "Output") -> tuple[int, ...]:
    """-1 for what is open; () also for a tensor of any rank."""
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        return ()
    return tuple(-1 if size.is_dynamic else size.get_length() for size in shape)


def _data_type(name: str, port: "Output") -> DataType:
    element = port.get_element_type().get_type_name()
    if element not in ELEMENT_TYPES:
        raise SluiceError(ErrorCode.UNIMPLEMENTED, f"unsupported datatype {element} for I/O '{name}'")
    return ELEMENT_TYPES[element]
