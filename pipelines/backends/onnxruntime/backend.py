"""Loads ONNX models."""

import asyncio
from collections.abc import Mapping, Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.errors import ErrorCode, SluiceError
from pipelines.backends.arrays.agreement import check_agreement
from pipelines.backends.arrays.batch import BatchForm
from pipelines.backends.arrays.completion import complete_config, needs_completion
from pipelines.backends.arrays.instance import ArrayInstance
from pipelines.backends.arrays.signature import Signature
from pipelines.backends.base import Backend, BackendContext, ModelSource
from pipelines.backends.labels import read_labels
from pipelines.backends.onnxruntime.placement import num_usable_gpus, providers_of
from pipelines.backends.onnxruntime.session import OnnxSession, model_path
from pipelines.backends.placement import Placement, placements_of
from pipelines.batching.scheduled import ScheduledModel
from pipelines.inference.model import Model
from pipelines.inference.spec import spec_of

PLATFORM = "onnxruntime_onnx"
DEFAULT_MAX_BATCH_SIZE = 4
"""Triton's `--backend-config=default-max-batch-size`, where it is not given."""
_UNOPTIMIZED = 2


class OnnxRuntimeBackend(Backend):
    """A model is a file, or a folder with a file and its external data."""

    name = "onnxruntime"
    default_model_filename = "model.onnx"

    def start_loading_early(self) -> None:
        import onnxruntime  # noqa: F401

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        config = ModelConfig()
        config.CopyFrom(source.config)
        config.platform = config.platform or PLATFORM
        if needs_completion(config):
            signature = await asyncio.to_thread(_read_signature, source)
            complete_config(config, signature, _default_max_batch_size(context.backend_options))
        return config

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        """Raises SluiceError INVALID where the configuration contradicts the model, else with onnxruntime's reason."""
        config, spec = source.config, spec_of(source.config, source.version)
        placements = placements_of(config, await asyncio.to_thread(num_usable_gpus))
        sessions = await asyncio.to_thread(_open_sessions, source, placements)
        for session in sessions.values():
            check_agreement(config, spec, session.signature)
        instances = [
            ArrayInstance(each, sessions[each.gpu], BatchForm(spec, sessions[each.gpu])) for each in placements
        ]
        labels = await asyncio.to_thread(read_labels, config, source.folder)
        return ScheduledModel(source, instances, labels, context)


def _open_sessions(source: ModelSource, placements: Sequence[Placement]) -> dict[int | None, OnnxSession]:
    """One for each device that an instance is on."""
    path = model_path(source)
    devices = {placement.gpu: placement for placement in placements}
    return {
        gpu: OnnxSession(path, source.config, providers_of(placement, source.config))
        for gpu, placement in devices.items()
    }


def _read_signature(source: ModelSource) -> Signature:
    """Opens the model without what takes time and changes no signature."""
    config = ModelConfig()
    config.CopyFrom(source.config)
    config.optimization.graph.level = _UNOPTIMIZED
    return OnnxSession(model_path(source), config, providers_of(Placement(config.name), config)).signature


def _default_max_batch_size(options: Mapping[str, Mapping[str, str]]) -> int:
    """The backend's own option, else the one for all backends."""
    key = "default-max-batch-size"
    text = options.get("onnxruntime", {}).get(key) or options.get("", {}).get(key)
    if text is None:
        return DEFAULT_MAX_BATCH_SIZE
    try:
        return int(text)
    except ValueError:
        raise SluiceError(ErrorCode.INVALID, f"'{text}' is no {key}") from None
