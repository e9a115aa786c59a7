"""Which plan a GPU gets: `cc_model_filenames` by compute capability, else `default_model_filename`."""

from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backends.tensorrt.gpus import Capability, Gpu, capability_text
from serving.spec import ModelSource
from sluice.errors import ErrorCode, SluiceError

DEFAULT_FILENAME = "model.plan"


def plan_filename(config: ModelConfig, capability: Capability) -> str:
    """Keys are 7.5, and 75 is taken for it: some write it so."""
    by_capability = {capability_of(key): name for key, name in config.cc_model_filenames.items()}
    return by_capability.get(capability) or _default(config)


def plan_path(source: ModelSource, gpu: Gpu) -> Path:
    """The file for `gpu`. Raises SluiceError UNAVAILABLE where it is not there."""
    path = source.version_folder / plan_filename(source.config, gpu.capability)
    if not path.is_file():
        raise SluiceError(
            ErrorCode.UNAVAILABLE,
            f"unable to find '{path}' for model instance '{source.name}', which {gpu.name} with compute capability "
            f"{capability_text(gpu.capability)} takes ({plans_text(source.config)})",
        )
    return path


def capability_of(key: str) -> Capability | None:
    """7.5 and 75 are the same, and 120 is 12.0; None for what is neither."""
    major, dot, minor = key.partition(".")
    if not dot:
        major, minor = key[:-1], key[-1:]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def plans_text(config: ModelConfig) -> str:
    """Which GPU takes which file, for errors."""
    known = {capability_of(key): name for key, name in config.cc_model_filenames.items()}
    parts = [f"compute capability {capability_text(each)}: {known[each]}" for each in sorted(filter(None, known))]
    return ", ".join([*parts, f"any other: {_default(config)}" if parts else f"any: {_default(config)}"])


def _default(config: ModelConfig) -> str:
    return config.default_model_filename or DEFAULT_FILENAME
