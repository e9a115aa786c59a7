"""What looks at a model's files before it is loaded: `model_repository_agents`."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.spec import inner_path
from sluice.errors import ErrorCode, SluiceError

CHECKSUM = "checksum"
_ALGORITHMS = ("md5", "sha1", "sha256")


def run_agents(config: ModelConfig, folder: Path) -> None:
    """Let each agent look at `folder`, in order: for a thread.

    Raises SluiceError INVALID for what an agent refuses, and UNIMPLEMENTED for an agent that there is not.
    """
    for agent in config.model_repository_agents.agents:
        if agent.name != CHECKSUM:
            message = f"unable to find repository agent '{agent.name}' of model '{config.name}'; there is '{CHECKSUM}'"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message)
        _check_sums(agent.parameters, folder)


def _check_sums(expected: Mapping[str, str], folder: Path) -> None:
    """Parameters of the checksum agent: `ALGORITHM:PATH`, inside the model's folder, with the sum in hex."""
    for key, wanted in sorted(expected.items()):
        algorithm, colon, path = key.partition(":")
        if not colon:
            raise SluiceError(ErrorCode.INVALID, f"failed to parse key: {key}; it should be ALGORITHM:PATH")
        if algorithm.lower() not in _ALGORITHMS:
            listed = ", ".join(each.upper() for each in _ALGORITHMS)
            message = f"Unsupported checksum algorithm: {algorithm}; supported are {listed}"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message)
        found = _sum(folder / inner_path(path), path, algorithm.lower())
        if found != wanted.strip().lower():
            message = f"Mismatched {algorithm.upper()} hash for file {path}, expect: {wanted}, got: {found}"
            raise SluiceError(ErrorCode.INVALID, message)


def _sum(file: Path, path: str, algorithm: str) -> str:
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, algorithm).hexdigest()
    except OSError as error:
        message = f"failed to open text file for read {path}: {error.strerror}"
        raise SluiceError(ErrorCode.INVALID, message) from None
