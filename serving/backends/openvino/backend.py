"""Loads what OpenVINO reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backend import ModelFile
from serving.backends.arrays.backend import ArrayBackend
from serving.backends.arrays.signature import Signature
from serving.backends.openvino.failures import failure_of, reading_failure_of
from serving.backends.openvino.options import OpenVinoOptions, options_of
from serving.backends.openvino.preparation import prepared
from serving.backends.openvino.session import OpenVinoSession
from serving.backends.openvino.signature import Names, names_in, signature_of
from serving.instance import HostPolicy, Placement
from serving.spec import ModelSource
from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:
    from openvino import Core, Model


class OpenVinoBackend(ArrayBackend):
    """IR (`model.xml` beside `model.bin`), or another file that OpenVINO reads, by `default_model_filename`."""

    name = "openvino"
    model_files: tuple[ModelFile, ...] = (ModelFile("model.xml"),)
    detection_order = 50
    default_model_filename = "model.xml"

    def start_loading_early(self) -> None:
        import openvino  # noqa: F401

    def read(self, core: "Core", source: ModelSource) -> "Model":
        """Raises SluiceError UNAVAILABLE where there is no file, and what OpenVINO raises."""
        return core.read_model(model_path(source))

    def options(self, config: ModelConfig) -> OpenVinoOptions:
        """Raises SluiceError INVALID for values that there are not."""
        return options_of(config)

    def names(self, source: ModelSource) -> Names:
        """Which of its names a tensor goes by."""
        return names_in(source.config)

    def read_signature(self, source: ModelSource) -> Signature:
        options = self.options(source.config)
        return self._signature(self._prepared(_core(options), source, options), source, options)

    def open_session(
        self, source: ModelSource, placements: Sequence[Placement], policy: HostPolicy | None
    ) -> OpenVinoSession:
        options = self.options(source.config)
        core = _core(options)
        model = self._prepared(core, source, options)
        signature = self._signature(model, source, options)
        try:
            num_cores = len(policy.cores) if policy is not None else 0
            properties = options.compiled_for(len(placements), num_cores)
            compiled = core.compile_model(model, options.device, properties)
        except RuntimeError as error:
            raise failure_of(error, "loading model") from error
        fixed_batch = source.config.max_batch_size if options.has_fixed_batch else 0
        return OpenVinoSession(compiled, signature, fixed_batch, pads_batches=options.pads_batches)

    def _prepared(self, core: "Core", source: ModelSource, options: OpenVinoOptions) -> "Model":
        try:
            model = self.read(core, source)
        except RuntimeError as error:
            raise reading_failure_of(error) from error
        try:
            return prepared(model, source.config, options)
        except RuntimeError as error:
            raise failure_of(error, "fitting the model to its configuration") from error

    def _signature(self, model: "Model", source: ModelSource, options: OpenVinoOptions) -> Signature:
        has_fixed_batch = options.has_fixed_batch and source.config.max_batch_size > 0
        return signature_of(model, self.names(source), has_fixed_batch=has_fixed_batch)


def model_path(source: ModelSource) -> Path:
    """Raises SluiceError UNAVAILABLE where there is none."""
    path = source.model_file
    if not path.exists():
        raise SluiceError(ErrorCode.UNAVAILABLE, f"unable to find '{path}' for model '{source.name}'")
    return path


def _core(options: OpenVinoOptions) -> "Core":
    """One for each model, so that a library of operations is known to its own model alone."""
    from openvino import Core

    core = Core()
    # A file that is replaced while it is mapped would change, or end, the model that is being served.
    core.set_property({"ENABLE_MMAP": False})
    if options.extension:
        try:
            core.add_extension(options.extension)
        except RuntimeError as error:
            raise failure_of(error, "loading custom CPU extensions") from error
    return core
