"""The backend `openvino`: reads, adapts and compiles models. The backend `tensorflow` derives from it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backend import ModelFile
from sluice.serving.backends.arrays.backend import ArrayBackend
from sluice.serving.backends.arrays.session import Signature
from sluice.serving.backends.openvino.model import ClientTensorNames, adapt_model, configured_names, read_signature
from sluice.serving.backends.openvino.options import OpenVinoOptions, parse_options
from sluice.serving.backends.openvino.session import OpenVinoSession, convert_error, convert_read_error
from sluice.serving.instance import HostPolicy, Placement
from sluice.serving.spec import ModelSource

if TYPE_CHECKING:
    from openvino import Core, Model


class OpenVinoBackend(ArrayBackend):
    """Loads IR (`model.xml` beside `model.bin`), or another file that OpenVINO reads, by `default_model_filename`."""

    name = "openvino"
    is_stateless = True
    model_files: tuple[ModelFile, ...] = (ModelFile("model.xml"),)
    detection_order = 50
    default_model_filename = "model.xml"

    def start_loading_early(self) -> None:
        import openvino  # noqa: F401

    def read(self, core: "Core", source: ModelSource) -> "Model":
        """Read the model's file. Raises UNAVAILABLE where there is none, and what OpenVINO raises."""
        return core.read_model(model_path(source))

    def options(self, config: ModelConfig) -> OpenVinoOptions:
        """Return the options of a configuration. Raises INVALID for invalid values."""
        return parse_options(config)

    def tensor_names(self, source: ModelSource) -> ClientTensorNames:
        """Return the names by which clients know the model's tensors."""
        return configured_names(source.config)

    def check_options(self, config: ModelConfig) -> None:
        self.options(config)

    def can_open(self, config: ModelConfig) -> bool:
        return not self.options(config).extension

    def read_signature(self, source: ModelSource) -> Signature:
        options = self.options(source.config)
        return self._read_signature(self._read_model(_new_core(options), source, options), source, options)

    def open_session(
        self, source: ModelSource, placements: Sequence[Placement], policy: HostPolicy | None
    ) -> OpenVinoSession:
        options = self.options(source.config)
        core = _new_core(options)
        model = self._read_model(core, source, options)
        signature = self._read_signature(model, source, options)
        try:
            num_cores = len(policy.cores) if policy is not None else 0
            properties = options.compile_properties(len(placements), num_cores)
            compiled = core.compile_model(model, options.device, properties)
        except RuntimeError as error:
            raise convert_error(error, "loading model") from error
        fixed_batch = source.config.max_batch_size if options.has_fixed_batch else 0
        return OpenVinoSession(compiled, signature, fixed_batch, pads_batches=options.pads_batches)

    def _read_model(self, core: "Core", source: ModelSource, options: OpenVinoOptions) -> "Model":
        try:
            model = self.read(core, source)
        except RuntimeError as error:
            raise convert_read_error(error) from error
        try:
            return adapt_model(model, source.config, options)
        except RuntimeError as error:
            raise convert_error(error, "fitting the model to its configuration") from error

    def _read_signature(self, model: "Model", source: ModelSource, options: OpenVinoOptions) -> Signature:
        has_fixed_batch = options.has_fixed_batch and source.config.max_batch_size > 0
        return read_signature(model, self.tensor_names(source), has_fixed_batch=has_fixed_batch)


def model_path(source: ModelSource) -> Path:
    """Return the model's file. Raises UNAVAILABLE where there is none."""
    path = source.model_file
    if not path.exists():
        raise SluiceError(ErrorCode.UNAVAILABLE, f"unable to find '{path}' for model '{source.name}'")
    return path


def _new_core(options: OpenVinoOptions) -> "Core":
    """Return a new core. Each model has its own, so that it alone knows its library of custom operations."""
    from openvino import Core

    core = Core()
    # Replacing a mapped file would change or crash the model that is served from it.
    core.set_property({"ENABLE_MMAP": False})
    if options.extension:
        try:
            core.add_extension(options.extension)
        except RuntimeError as error:
            raise convert_error(error, "loading custom CPU extensions") from error
    return core
