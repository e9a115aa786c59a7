"""Loads TorchScript models and AOTInductor packages."""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backend import Backend, BackendContext, ModelFile
from serving.backends.arrays.agreement import check_agreement
from serving.backends.arrays.batch import BatchForm
from serving.backends.arrays.batch_tensors import batch_tensors_of
from serving.backends.arrays.instance import ArrayInstance
from serving.backends.pytorch.configured import ConfiguredTensors, configured_tensors
from serving.backends.pytorch.library import ThreadCounts, num_usable_gpus, require_torch
from serving.backends.pytorch.options import TorchOptions, options_of, unobeyed_parameters
from serving.batching.scheduled_model import ScheduledModel
from serving.instance import Placement, choose_host_policy, place_instances
from serving.model import Model
from serving.spec import ModelSource, build_spec, read_labels
from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:
    from serving.backends.pytorch.session import TorchSession

TORCHSCRIPT, PACKAGE = "pytorch_libtorch", "torch_aoti"
"""Platforms, in Triton's words."""
_FILENAMES = {TORCHSCRIPT: "model.pt", PACKAGE: "model.pt2"}
_log = logging.getLogger(__name__)


class PyTorchBackend(Backend):
    """The configuration says inputs and outputs: the files do not."""

    name = "pytorch"
    model_files: tuple[ModelFile, ...] = (
        ModelFile("model.pt", "pytorch_libtorch"),
        ModelFile("model.pt2", "torch_aoti"),
    )
    detection_order = 30
    supported_fields = frozenset({"batch_input", "batch_output", "instance_group.gpus", "instance_group.host_policy"})

    def __init__(self) -> None:
        self._threads = ThreadCounts()

    def start_loading_early(self) -> None:
        import torch  # noqa: F401

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        config = ModelConfig()
        config.CopyFrom(source.config)
        config.platform = _platform(source.config)
        config.default_model_filename = config.default_model_filename or _FILENAMES[config.platform]
        return config

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        """Raises SluiceError UNAVAILABLE without PyTorch or the file, INVALID where the configuration does not fit the
        model, else INTERNAL with PyTorch's reason.
        """
        config, spec = source.config, build_spec(source.config, source.version)
        batch_tensors = batch_tensors_of(config)
        tensors = configured_tensors(spec, batch_tensors)
        check_agreement(config, spec, tensors.signature)
        opened = await asyncio.to_thread(self._open, source, tensors)
        labels = await asyncio.to_thread(read_labels, config, source.folder)
        instances = [
            ArrayInstance(
                placement,
                session,
                BatchForm(spec, session, batch_tensors),
                choose_host_policy(placement, context.host_policies),
            )
            for placement, session in opened
        ]
        return ScheduledModel(source, instances, labels, context)

    def _open(self, source: ModelSource, tensors: ConfiguredTensors) -> "list[tuple[Placement, TorchSession]]":
        """Each instance's place and session. On a thread."""
        config, path = source.config, _model_path(source)
        options = options_of(config)
        require_torch(source.name)
        if unobeyed := unobeyed_parameters(config):
            _log.warning("model '%s': not obeyed: %s", source.name, "; ".join(unobeyed))
        self._threads.apply(source.name, options.intra_op_threads, options.inter_op_threads)
        placements = place_instances(config, num_usable_gpus())
        opener = _Opener(path, tensors, options, is_package=_platform(config) == PACKAGE)
        return list(zip(placements, opener.open(placements), strict=True))


class _Opener:
    """Opens one model for its instances."""

    def __init__(self, path: Path, tensors: ConfiguredTensors, options: TorchOptions, *, is_package: bool) -> None:
        self._path = path
        self._tensors = tensors
        self._options = options
        self._is_package = is_package

    def open(self, placements: Sequence[Placement]) -> "list[TorchSession]":
        """One a placement; those on one device share it where the options say so. On a thread."""
        if not self._options.shares_weights:
            return [self._session(placement, 1) for placement in placements]
        counts = Counter((each.kind, each.gpu) for each in placements)
        shared = {
            (each.kind, each.gpu): self._session(each, counts[each.kind, each.gpu])
            for each in {(each.kind, each.gpu): each for each in placements}.values()
        }
        return [shared[each.kind, each.gpu] for each in placements]

    def _session(self, placement: Placement, num_threads: int) -> "TorchSession":
        import torch

        from serving.backends.pytorch.package import PackageSession
        from serving.backends.pytorch.torchscript import TorchScriptSession

        device = torch.device("cpu") if placement.gpu is None else torch.device("cuda", placement.gpu)
        if self._is_package:
            return PackageSession(self._path, self._tensors, self._options, device, num_threads)
        is_placed = placement.kind != "MODEL"
        return TorchScriptSession(self._path, self._tensors, self._options, device, is_placed=is_placed)


def _platform(config: ModelConfig) -> str:
    """By what is given and by the file's name. Raises SluiceError INVALID for one that is not PyTorch's."""
    if config.platform and config.platform not in _FILENAMES:
        reason = f"unexpected platform type '{config.platform}' for {config.name}"
        raise SluiceError(ErrorCode.INVALID, f"{reason}; backend 'pytorch' has {' and '.join(_FILENAMES)}")
    is_package = config.platform == PACKAGE or config.default_model_filename.endswith(".pt2")
    return PACKAGE if is_package else TORCHSCRIPT


def _model_path(source: ModelSource) -> Path:
    """Raises SluiceError UNAVAILABLE."""
    name = source.config.default_model_filename or _FILENAMES[_platform(source.config)]
    path = source.version_folder / name
    if not path.is_file():
        raise SluiceError(ErrorCode.UNAVAILABLE, f"unable to find '{path}' for model instance '{source.name}'")
    return path
