"""The backend `tensorflow`: loads SavedModels and frozen graphs through OpenVINO's TensorFlow frontend."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError, invalid_argument
from sluice.serving.backend import ModelFile
from sluice.serving.backends.openvino.backend import OpenVinoBackend, model_path
from sluice.serving.backends.openvino.model import ClientTensorNames
from sluice.serving.backends.openvino.options import OpenVinoOptions, is_number, parse_options
from sluice.serving.backends.tensorflow.graph import read_graph
from sluice.serving.backends.tensorflow.saved_model import SavedModel, read_saved_model
from sluice.serving.spec import ModelSource

if TYPE_CHECKING:
    from openvino import Core, Model

_log = logging.getLogger(__name__)
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
