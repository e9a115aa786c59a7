"""An open AOTInductor package: a model that was compiled ahead of time, with its weights."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sluice.errors import ErrorCode, SluiceError, invalid_argument
from sluice.serving.backends.pytorch.options import TorchOptions
from sluice.serving.backends.pytorch.session import TorchSession, extract_message
from sluice.serving.backends.pytorch.signature import (
    ConfiguredTensors,
    match_paths,
    parse_input_paths,
    parse_output_paths,
)
from sluice.serving.spec import ModelSpec
from sluice.serving.tensors.datatypes import BYTES

_COMPILED = "/data/aotinductor/"
"""Folder of the libraries in a package. A package that torch.export.save wrote has none."""


class PackageSession(TorchSession):
    """Runs a package. It has tensors only, addressed by their paths in the call that the model was compiled with."""

    def __init__(
        self, path: Path, tensors: ConfiguredTensors, options: TorchOptions, device: torch.device, num_runners: int = 1
    ) -> None:
        """Load the file, for `num_runners` threads at once. Blocks. Raises INTERNAL, INVALID where it does not fit."""
        super().__init__(tensors, options, device)
        spec = tensors.spec
        self._loader: Any = _load(path, spec.name, device, num_runners)
        arguments, results = self._loader.get_call_spec()
        inputs = (*tensors.inputs, *tensors.batcher_inputs)
        self._input_positions = match_paths(spec.name, "input", inputs, parse_input_paths(arguments))
        self._output_positions = match_paths(spec.name, "output", list(tensors.outputs), parse_output_paths(results))
        _check_types(spec)

    def _compute(self, values: dict[str, object]) -> Sequence[object]:
        ordered = sorted(values, key=self._input_positions.__getitem__)
        results: list[object] = self._loader.boxed_run([values[name] for name in ordered])
        return results

    def close(self) -> None:
        self._loader = None


def _load(path: Path, model: str, device: torch.device, num_runners: int) -> Any:
    from torch._inductor.package import load_package

    _check_is_compiled(path, model)
    index = device.index if device.type == "cuda" else -1
    try:
        return load_package(str(path), num_runners=num_runners, device_index=index).loader
    except Exception as error:
        raise SluiceError(ErrorCode.INTERNAL, f"failed to load model '{model}': {extract_message(error)}") from error


def _check_is_compiled(path: Path, model: str) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            is_compiled = any(_COMPILED in name for name in archive.namelist())
    except zipfile.BadZipFile as error:
        raise invalid_argument(f"failed to load model '{model}': {path} is no package: {error}") from None
    if not is_compiled:
        raise invalid_argument(
            f"failed to load model '{model}': {path} holds no compiled model; write it with "
            "torch._inductor.aoti_compile_and_package(torch.export.export(...), package_path=...)"
        )


def _check_types(spec: ModelSpec) -> None:
    for tensor in (*spec.inputs.values(), *spec.outputs.values()):
        if tensor.data_type is BYTES or tensor.is_optional:
            what = "of type TYPE_STRING" if tensor.data_type is BYTES else "optional"
            reason = f"unable to load model '{spec.name}', '{tensor.name}' is {what}, which a package cannot have"
            raise invalid_argument(reason)
