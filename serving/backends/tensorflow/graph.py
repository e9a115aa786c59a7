"""Reads a frozen graph (`model.graphdef`) and cuts it at the inputs and outputs of its configuration."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import invalid_argument
from sluice.serving.backends.openvino.model import configured_names

if TYPE_CHECKING:
    from openvino import Core, Model, Node, Output

_FIRST_OUTPUT = ":0"
_PARAMETER, _RESULT = "Parameter", "Result"


def read_graph(core: "Core", path: Path, config: ModelConfig) -> "Model":
    """Read a graph, whose tensors also get their operations' names. Raises INVALID for a name that it lacks."""
    # The frontend could cut the graph itself, but would block every other thread while it converts.
    model = core.read_model(path)
    tensors, names = _name_tensors(model), configured_names(config)
    # Outputs first, because an input may replace a tensor that is an output.
    if names.outputs:
        _cut_outputs(model, _find_tensors(tensors, names.outputs))
    if names.inputs:
        _cut_inputs(model, _find_tensors(tensors, names.inputs))
    return model


def _find_tensors(tensors: "dict[str, Output]", names: Iterable[str]) -> "list[Output]":
    for name in names:
        if name.removesuffix(_FIRST_OUTPUT) not in tensors:
            raise invalid_argument(f"the graph has no tensor '{name}'")
    return [tensors[name.removesuffix(_FIRST_OUTPUT)] for name in sorted(names)]


def _name_tensors(model: "Model") -> "dict[str, Output]":
    """Name tensors by their operations, later outputs with a number too, and return them by those names."""
    found = {}
    for operation in model.get_ordered_ops():
        # A result has the tensor of another operation, and its names.
        outputs = operation.outputs() if operation.get_type_name() != _RESULT else []
        for output in outputs:
            for name in list(output.get_names()):
                output.get_tensor().add_names({name.removesuffix(_FIRST_OUTPUT)})
                found[name.removesuffix(_FIRST_OUTPUT)] = output
    return found


def _cut_inputs(model: "Model", configured: "Iterable[Output]") -> None:
    parameters = [_make_parameter(each) for each in configured]
    known = {each.get_friendly_name() for each in model.get_parameters()}
    model.add_parameters([each for each in parameters if each.get_friendly_name() not in known])
    kept = {each.get_friendly_name() for each in parameters}
    for parameter in model.get_parameters():
        if parameter.get_friendly_name() not in kept:
            model.remove_parameter(parameter)


def _cut_outputs(model: "Model", configured: "Iterable[Output]") -> None:
    from openvino import opset13

    locations = {_location(each): each for each in configured}
    known = {_location(each.input_value(0)): each for each in model.get_results()}
    model.add_results([opset13.result(each) for location, each in locations.items() if location not in known])
    for location, result in known.items():
        if location not in locations:
            model.remove_result(result)


def _location(tensor: "Output") -> tuple[str, int]:
    return tensor.get_node().get_friendly_name(), tensor.get_index()


def _make_parameter(tensor: "Output") -> "Node":
    """Return the parameter that provides the tensor, made in place of its operation where that is not one."""
    from openvino import opset13

    if tensor.get_node().get_type_name() == _PARAMETER:
        return tensor.get_node()
    parameter = opset13.parameter(tensor.get_partial_shape(), tensor.get_element_type())
    for reader in tensor.get_target_inputs():
        reader.replace_source_output(parameter.output(0))
    parameter.output(0).get_tensor().set_names(tensor.get_names())
    return parameter
