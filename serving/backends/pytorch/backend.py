"""The backend `pytorch`: chooses the kind of a model's file and opens its sessions."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError, invalid_argument
from sluice.serving.backend import Backend, BackendContext, ModelFile
from sluice.serving.backends.arrays.batch import BatchAssembler, BatchTensors, parse_batch_tensors
from sluice.serving.backends.arrays.config import check_config
from sluice.serving.backends.arrays.instance import ArrayInstance
from sluice.serving.backends.pytorch.options import ProcessThreads, TorchOptions, ignored_parameters, parse_options
from sluice.serving.backends.pytorch.signature import ConfiguredTensors, output_positions, read_configured_tensors
from sluice.serving.batching.scheduled_model import ScheduledModel
from sluice.serving.config.validation import complete_and_check
from sluice.serving.findings import Finding
from sluice.serving.instance import Placement, choose_host_policy, place_instances
from sluice.serving.model import Model
from sluice.serving.spec import ModelSource, build_spec, read_labels

if TYPE_CHECKING:
    from sluice.serving.backends.pytorch.session import TorchSession

_TORCHSCRIPT, _PACKAGE = "pytorch_libtorch", "torch_aoti"
"""Platforms, as Triton names them."""
_FILENAMES = {_TORCHSCRIPT: "model.pt", _PACKAGE: "model.pt2"}
log = logging.getLogger(__name__)


class PyTorchBackend(Backend):
    """Loads TorchScript models and AOTInductor packages, whose inputs and outputs only config.pbtxt declares."""

    name = "pytorch"
    model_files: tuple[ModelFile, ...] = (ModelFile("model.pt", _TORCHSCRIPT), ModelFile("model.pt2", _PACKAGE))
    detection_order = 30
    supported_fields = frozenset({"batch_input", "batch_output", "instance_group.gpus", "instance_group.host_policy"})

    def __init__(self) -> None:
        self._threads = ProcessThreads()

    def start_loading_early(self) -> None:
        import torch  # noqa: F401

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        return _complete(source.config)

    def check(self, source: ModelSource) -> None:
        """Check everything but the model's file, which only PyTorch can open, with all its weights."""
        _read_tensors(ModelSource(source.folder, source.version, complete_and_check(_complete(source.config))))
        _model_path(source)
        parse_options(source.config)

    def machine_findings(self, config: ModelConfig) -> Iterator[Finding]:
        if find_spec("torch") is None:
            try:
                require_torch(config.name)
            except SluiceError as error:
                yield Finding(error.message, "backend")

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        """Load the model. Raises UNAVAILABLE without PyTorch or file, INVALID for a contradiction, else INTERNAL."""
        config, spec = source.config, build_spec(source.config, source.version)
        batch_tensors, tensors = _read_tensors(source)
        opened = await asyncio.to_thread(self._open_sessions, source, tensors)
        labels = await asyncio.to_thread(read_labels, config, source.folder)
        instances = [
            ArrayInstance(
                placement,
                session,
                BatchAssembler(spec, session, batch_tensors),
                choose_host_policy(placement, context.host_policies),
            )
            for placement, session in opened
        ]
        return ScheduledModel(source, instances, labels, context)

    def _open_sessions(self, source: ModelSource, tensors: ConfiguredTensors) -> "list[tuple[Placement, TorchSession]]":
        """Open the sessions, and return them with the placements of their instances. Called on a thread."""
        config, path = source.config, _model_path(source)
        options = parse_options(config)
        require_torch(source.name)
        if ignored := ignored_parameters(config):
            log.warning("model '%s': not obeyed: %s", source.name, "; ".join(ignored))
        self._threads.apply(source.name, options.intra_op_threads, options.inter_op_threads)
        placements = place_instances(config, num_usable_gpus())
        is_package = _resolve_platform(config) == _PACKAGE
        if not options.shares_weights:
            return [(each, _open_session(path, tensors, options, each, 1, is_package)) for each in placements]
        counts = Counter((each.kind, each.gpu) for each in placements)
        shared = {
            (each.kind, each.gpu): _open_session(path, tensors, options, each, counts[each.kind, each.gpu], is_package)
            for each in {(each.kind, each.gpu): each for each in placements}.values()
        }
        return [(each, shared[each.kind, each.gpu]) for each in placements]


def _complete(config: ModelConfig) -> ModelConfig:
    completed = deepcopy(config)
    completed.platform = _resolve_platform(config)
    completed.default_model_filename = config.default_model_filename or _FILENAMES[completed.platform]
    return completed


def _read_tensors(source: ModelSource) -> tuple[BatchTensors, ConfiguredTensors]:
    """Return the tensors of a complete configuration. Raises INVALID for those that no file could have."""
    spec = build_spec(source.config, source.version)
    batch_tensors = parse_batch_tensors(source.config)
    tensors = read_configured_tensors(spec, batch_tensors)
    check_config(source.config, spec, tensors.signature)
    if _resolve_platform(source.config) == _TORCHSCRIPT and spec.inputs:
        output_positions(spec)
    return batch_tensors, tensors


def _open_session(
    path: Path,
    tensors: ConfiguredTensors,
    options: TorchOptions,
    placement: Placement,
    num_threads: int,
    is_package: bool,
) -> "TorchSession":
    import torch

    from sluice.serving.backends.pytorch.package import PackageSession
    from sluice.serving.backends.pytorch.torchscript import TorchScriptSession

    device = torch.device("cpu") if placement.gpu is None else torch.device("cuda", placement.gpu)
    if is_package:
        return PackageSession(path, tensors, options, device, num_threads)
    return TorchScriptSession(path, tensors, options, device, is_placed=placement.kind != "MODEL")


def _resolve_platform(config: ModelConfig) -> str:
    """Return the platform, from the configuration or the file's name. Raises INVALID for one that is not PyTorch's."""
    if config.platform and config.platform not in _FILENAMES:
        reason = f"unexpected platform type '{config.platform}' for {config.name}"
        raise invalid_argument(f"{reason}; backend 'pytorch' has {' and '.join(_FILENAMES)}")
    is_package = config.platform == _PACKAGE or config.default_model_filename.endswith(".pt2")
    return _PACKAGE if is_package else _TORCHSCRIPT


def _model_path(source: ModelSource) -> Path:
    """Return the model's file. Raises UNAVAILABLE where there is none."""
    name = source.config.default_model_filename or _FILENAMES[_resolve_platform(source.config)]
    path = source.version_folder / name
    if not path.is_file():
        raise SluiceError(ErrorCode.UNAVAILABLE, f"unable to find '{path}' for model instance '{source.name}'")
    return path


def require_torch(model: str) -> None:
    """Import torch. This takes seconds: call it on a thread. Raises UNAVAILABLE where torch is missing or broken."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        how = "install it with: pip install 'sluice[pytorch]'"
        reason = f"backend 'pytorch' needs PyTorch, which cannot be imported ({error}); {how}"
        raise SluiceError(ErrorCode.UNAVAILABLE, f"unable to load model '{model}', {reason}") from None


def num_usable_gpus() -> int:
    """Return the number of GPUs that the installed torch can run on."""
    import torch

    return int(torch.cuda.device_count())
