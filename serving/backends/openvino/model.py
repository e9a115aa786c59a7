"""A model that OpenVINO has read, before it is compiled: its signature, and its adaptation to the configuration."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInput, ModelOutput

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.arrays.config import inputs_set_by_server
from sluice.serving.backends.arrays.session import Signature, TensorSignature
from sluice.serving.backends.openvino.options import OpenVinoOptions
from sluice.serving.tensors.datatypes import BYTES, DATA_TYPES, DataType

if TYPE_CHECKING:
    from openvino import Model, Output

_ELEMENT_TYPES: dict[str, DataType] = {
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
"""Data types by OpenVINO's names."""
_CONFIG_TYPES = {each.config_name: name for name, each in _ELEMENT_TYPES.items()}
_OPEN = -1


@dataclass(frozen=True, slots=True)
class ClientTensorNames:
    """Names by which clients know the tensors. A tensor of the model may have several."""

    inputs: Collection[str] = ()
    outputs: Collection[str] = ()


def configured_names(config: ModelConfig) -> ClientTensorNames:
    states = config.sequence_batching.state
    return ClientTensorNames(
        {each.name for each in config.input} | inputs_set_by_server(config),
        {each.name for each in config.output} | {each.output_name for each in states},
    )


def read_signature(model: "Model", names: ClientTensorNames, *, has_fixed_batch: bool = False) -> Signature:
    """Return the model's signature. A tensor that has several names goes by the one among `names`.

    With `has_fixed_batch` every first dimension is the batch's, which is padded, and so is open. Raises UNIMPLEMENTED
    for types that the protocol lacks.
    """
    inputs, outputs = _read_tensors(model.inputs, names.inputs), _read_tensors(model.outputs, names.outputs)
    if has_fixed_batch:
        inputs, outputs = _open_batch_dim(inputs), _open_batch_dim(outputs)
    return Signature(inputs, {}, outputs)


def _open_batch_dim(tensors: dict[str, TensorSignature]) -> dict[str, TensorSignature]:
    return {name: replace(each, dims=(-1, *each.dims[1:])) for name, each in tensors.items()}


def _read_tensors(ports: "Sequence[Output]", configured: Collection[str]) -> dict[str, TensorSignature]:
    named = [(_choose_name(port, configured), port) for port in ports]
    return {name: TensorSignature(name, _read_data_type(name, port), _read_dims(port)) for name, port in named}


def _choose_name(port: "Output", configured: Collection[str]) -> str:
    names = [*sorted(port.get_names()), port.get_node().get_friendly_name()]
    return next((str(name) for name in names if name in configured), str(names[0]))


def _read_dims(port: "Output") -> tuple[int, ...]:
    """Return the dims of a tensor: -1 for open sizes, () also for an open rank."""
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        return ()
    return tuple(-1 if size.is_dynamic else size.get_length() for size in shape)


def _read_data_type(name: str, port: "Output") -> DataType:
    element = port.get_element_type().get_type_name()
    if element not in _ELEMENT_TYPES:
        raise SluiceError(ErrorCode.UNIMPLEMENTED, f"unsupported datatype {element} for I/O '{name}'")
    return _ELEMENT_TYPES[element]


def adapt_model(model: "Model", config: ModelConfig, options: OpenVinoOptions) -> "Model":
    """Return the model, changed or another, with its configuration's types and dims. Raises what OpenVINO raises."""
    model = _convert_types(model, config)
    if options.reshapes:
        leading = [_OPEN] if config.max_batch_size else []
        dims = {each.name: each.reshape.shape if each.HasField("reshape") else each.dims for each in config.input}
        model.reshape({name: [*leading, *sizes] for name, sizes in dims.items()})
    if options.has_fixed_batch and config.max_batch_size:
        _set_batch(model, config.max_batch_size)
    elif config.max_batch_size or _has_batch_layout(model):
        is_open = all(_read_dims(port)[:1] == (_OPEN,) for port in model.inputs)
        if not is_open:
            _set_batch(model, _OPEN)
    return model


def _convert_types(model: "Model", config: ModelConfig) -> "Model":
    """Convert at inputs and outputs between the configuration's types and the model's own."""
    from openvino import Type
    from openvino.preprocess import PrePostProcessor

    inputs, outputs = _conversions(model.inputs, config.input), _conversions(model.outputs, config.output)
    if not inputs and not outputs:
        return model
    processor = PrePostProcessor(model)
    for name, kind in inputs.items():
        processor.input(name).tensor().set_element_type(getattr(Type, kind))
    for name, kind in outputs.items():
        processor.output(name).tensor().set_element_type(getattr(Type, kind))
    return processor.build()


def _conversions(ports: "Iterable[Output]", given: Iterable[ModelInput | ModelOutput]) -> dict[str, str]:
    """Return OpenVINO's name of the configured type of each tensor that has another. Strings are never converted."""
    own_types = {name: port.get_element_type().get_type_name() for port in ports for name in port.get_names()}
    configured = {
        each.name: _CONFIG_TYPES.get(model_config_pb2.DataType.Name(each.data_type), "string") for each in given
    }
    return {
        name: kind
        for name, kind in configured.items()
        if name in own_types and kind != own_types[name] and "string" not in (kind, own_types[name])
    }


def _has_batch_layout(model: "Model") -> bool:
    """Return whether the model's layouts say that each first dimension is the batch's."""
    from openvino import layout_helpers

    ports = (*model.inputs, *model.outputs)
    layouts = [layout_helpers.get_layout(port) for port in ports]
    return all(layout_helpers.has_batch(each) and layout_helpers.batch_idx(each) == 0 for each in layouts)


def _set_batch(model: "Model", size: int) -> None:
    from openvino import Layout, set_batch

    for port in model.inputs:
        port.get_node().set_layout(Layout("N..."))
    set_batch(model, size)
