"""The backend `tensorflow`: loads SavedModels and frozen graphs through OpenVINO's TensorFlow frontend."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError, invalid_argument
from sluice.serving.backend import ModelFile
from sluice.serving.backends.openvino.backend import OpenVinoBackend, model_path
from sluice.serving.backends.openvino.model import ClientTensorNames, configured_names
from sluice.serving.backends.openvino.options import OpenVinoOptions, is_number, parse_options
from sluice.serving.backends.tensorflow.saved_model import SavedModel, read_saved_model
from sluice.serving.spec import ModelSource

if TYPE_CHECKING:
    from openvino import Core, Model, Node, Output

_log = logging.getLogger(__name__)
_FIRST_OUTPUT = ":0"
_PARAMETER, _RESULT = "Parameter", "Result"
_THREADS = "TF_NUM_INTRA_THREADS"
_IGNORED_PARAMETERS = ("TF_NUM_INTER_THREADS", "TF_USE_PER_SESSION_THREADS", "MAX_SESSION_SHARE_COUNT")


class TensorFlowBackend(OpenVinoBackend):
    """Loads TensorFlow models: a folder is a SavedModel, a file a frozen graph."""

    name = "tensorflow"
    model_files: tuple[ModelFile, ...] = (
        ModelFile("model.savedmodel", "tensorflow_savedmodel"),
        ModelFile("model.graphdef", "tensorflow_graphdef"),
    )
    detection_order = 40
    default_model_filename = "model.savedmodel"

    def read(self, core: "Core", source: ModelSource) -> "Model":
        path = model_path(source)
        if not path.is_dir():
            return read_graph(core, path, source.config)
        with _read_saved_model(source).served_folder() as folder:
            return core.read_model(folder)

    def tensor_names(self, source: ModelSource) -> ClientTensorNames:
        if not source.model_file.is_dir():
            return super().tensor_names(source)
        saved = _read_saved_model(source)
        return ClientTensorNames(saved.inputs, saved.outputs)

    def options(self, config: ModelConfig) -> OpenVinoOptions:
        _check_parameters(config)
        options = parse_options(config)
        # TensorFlow computes in the types of the model; OpenVINO would take shorter ones where the processor has them.
        properties = {"INFERENCE_PRECISION_HINT": "f32", **_thread_properties(config), **options.properties}
        return replace(options, properties=properties)


def _read_saved_model(source: ModelSource) -> SavedModel:
    return read_saved_model(
        source.model_file, _parameter(source.config, "TF_GRAPH_TAG"), _parameter(source.config, "TF_SIGNATURE_DEF")
    )


def _check_parameters(config: ModelConfig) -> None:
    if "TF_INIT_OPS_FILE" in config.parameters:
        raise SluiceError(
            ErrorCode.UNIMPLEMENTED,
            f"unable to load model '{config.name}', parameter 'TF_INIT_OPS_FILE': graphs are served frozen, without "
            "operations that initialize them",
        )
    ignored = [key for key in _IGNORED_PARAMETERS if key in config.parameters]
    if ignored:
        _log.warning("model '%s': not obeyed: %s (OpenVINO runs it, without sessions)", config.name, ", ".join(ignored))


def _thread_properties(config: ModelConfig) -> dict[str, str]:
    text = _parameter(config, _THREADS)
    if not text:
        return {}
    if not is_number(text):
        raise invalid_argument(f"expected the parameter '{_THREADS}' to be a non-negative number, got {text}")
    return {"INFERENCE_NUM_THREADS": text}


def _parameter(config: ModelConfig, key: str) -> str:
    return str(config.parameters[key].string_value) if key in config.parameters else ""


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
