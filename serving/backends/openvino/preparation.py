"""Gives a model that was read the types, dims and batch dimension that its configuration asks for."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInput, ModelOutput

from serving.backends.openvino.options import OpenVinoOptions
from serving.backends.openvino.signature import ELEMENT_TYPES, dims_of

if TYPE_CHECKING:
    from openvino import Model, Output

_CONFIG_TYPES = {each.config_name: name for name, each in ELEMENT_TYPES.items()}
_ANY = -1


def prepared(model: "Model", config: ModelConfig, options: OpenVinoOptions) -> "Model":
    """The model, changed in place or another. Raises what OpenVINO raises where it cannot be so."""
    model = _with_types(model, config)
    if options.reshapes:
        _reshape(model, config)
    if options.has_fixed_batch and config.max_batch_size:
        _set_batch(model, config.max_batch_size)
    elif (config.max_batch_size or _has_batch_layout(model)) and not _has_any_batch(model):
        _set_batch(model, _ANY)
    return model


def _with_types(model: "Model", config: ModelConfig) -> "Model":
    """Clients give and get the configuration's types; the model's own are converted."""
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
    """OpenVINO's types by name, where the model has another. Strings are never converted."""
    has = {name: port.get_element_type().get_type_name() for port in ports for name in port.get_names()}
    wanted = {each.name: _CONFIG_TYPES.get(model_config_pb2.DataType.Name(each.data_type), "string") for each in given}
    return {
        name: kind
        for name, kind in wanted.items()
        if name in has and kind != has[name] and "string" not in (kind, has[name])
    }


def _reshape(model: "Model", config: ModelConfig) -> None:
    leading = [_ANY] if config.max_batch_size else []
    model.reshape({tensor.name: [*leading, *_dims(tensor)] for tensor in config.input})


def _dims(tensor: ModelInput | ModelOutput) -> list[int]:
    return list(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)


def _has_batch_layout(model: "Model") -> bool:
    """Whether the model itself says that each first dimension is the batch's."""
    from openvino import layout_helpers

    ports = (*model.inputs, *model.outputs)
    layouts = [layout_helpers.get_layout(port) for port in ports]
    return all(layout_helpers.has_batch(each) and layout_helpers.batch_idx(each) == 0 for each in layouts)


def _has_any_batch(model: "Model") -> bool:
    return all(dims_of(port)[:1] == (_ANY,) for port in model.inputs)


def _set_batch(model: "Model", size: int) -> None:
    from openvino import Layout, set_batch

    for port in model.inputs:
        port.get_node().set_layout(Layout("N..."))
    set_batch(model, size)
