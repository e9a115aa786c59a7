"""A frozen graph (`model.graphdef`), cut where the configuration says its inputs and outputs are."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backends.openvino.signature import names_in
from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:
    from openvino import Core, Model, Node, Output

_FIRST_OUTPUT = ":0"
_PARAMETER, _RESULT = "Parameter", "Result"


def read_graph(core: "Core", path: Path, config: ModelConfig) -> "Model":
    """Its tensors also go by the names of their operations, as Triton's configurations have them.

    Raises SluiceError INVALID for names that the graph lacks, and what OpenVINO raises.
    """
    # The frontend's own means of cutting a graph would hold up every other thread while it converts.
    model = core.read_model(path)
    tensors, names = _tensors(model), names_in(config)
    # Outputs first: what an input replaces may be one.
    if names.outputs:
        _cut_outputs(model, _found(tensors, names.outputs))
    if names.inputs:
        _cut_inputs(model, _found(tensors, names.inputs))
    return model


def _found(tensors: "dict[str, Output]", names: Iterable[str]) -> "list[Output]":
    for name in names:
        if name.removesuffix(_FIRST_OUTPUT) not in tensors:
            raise SluiceError(ErrorCode.INVALID, f"the graph has no tensor '{name}'")
    return [tensors[name.removesuffix(_FIRST_OUTPUT)] for name in sorted(names)]


def _tensors(model: "Model") -> "dict[str, Output]":
    """By operation, and for outputs but the first with their number. Each is given that name too."""
    found = {}
    for operation in model.get_ordered_ops():
        # A result hands on the tensor of another operation, names and all.
        outputs = operation.outputs() if operation.get_type_name() != _RESULT else []
        for output in outputs:
            for name in list(output.get_names()):
                output.get_tensor().add_names({name.removesuffix(_FIRST_OUTPUT)})
                found[name.removesuffix(_FIRST_OUTPUT)] = output
    return found


def _cut_inputs(model: "Model", wanted: "Iterable[Output]") -> None:
    parameters = [_parameter(each) for each in wanted]
    known = {each.get_friendly_name() for each in model.get_parameters()}
    model.add_parameters([each for each in parameters if each.get_friendly_name() not in known])
    kept = {each.get_friendly_name() for each in parameters}
    for parameter in model.get_parameters():
        if parameter.get_friendly_name() not in kept:
            model.remove_parameter(parameter)


def _cut_outputs(model: "Model", wanted: "Iterable[Output]") -> None:
    from openvino import opset13

    places = {_place(each): each for each in wanted}
    known = {_place(each.input_value(0)): each for each in model.get_results()}
    model.add_results([opset13.result(each) for place, each in places.items() if place not in known])
    for place, result in known.items():
        if place not in places:
            model.remove_result(result)


def _place(tensor: "Output") -> tuple[str, int]:
    return tensor.get_node().get_friendly_name(), tensor.get_index()


def _parameter(tensor: "Output") -> "Node":
    """What gives the tensor from now on."""
    from openvino import opset13

    if tensor.get_node().get_type_name() == _PARAMETER:
        return tensor.get_node()
    parameter = opset13.parameter(tensor.get_partial_shape(), tensor.get_element_type())
    for reader in tensor.get_target_inputs():
        reader.replace_source_output(parameter.output(0))
    parameter.output(0).get_tensor().set_names(tensor.get_names())
    return parameter
