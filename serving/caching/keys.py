"""Under which name a response is kept: what the request asks, and of which model."""

from hashlib import blake2b, file_digest
from pathlib import Path
from typing import TYPE_CHECKING

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.request import InferRequest

if TYPE_CHECKING:
    from serving.spec import ModelSource

Key = bytes

_NOT_IN_RESPONSES = (
    "dynamic_batching",
    "instance_group",
    "metric_tags",
    "model_metrics",
    "model_warmup",
    "response_cache",
    "version_policy",
)
"""Fields by which servers that share a cache may differ: what a model answers is the same."""


def key_of(request: InferRequest, scope: bytes) -> Key:
    """Equal for requests that ask the model of `scope` for the same outputs of the same inputs, in whatever order.

    Custom parameters count, too, as a model may read them.
    """
    digest = blake2b(scope, digest_size=16)
    if request.requested_outputs or request.parameters:
        digest.update(repr((sorted(request.requested_outputs), sorted(request.parameters.items()))).encode())
    for name in sorted(request.inputs):
        tensor = request.inputs[name]
        # Lengths and names are spelled out, so that no two different requests hash the same bytes.
        digest.update(repr((name, tensor.datatype, tensor.shape, tensor.size_bytes)).encode())
        digest.update(tensor.raw)
    return digest.digest()


def fingerprint(source: "ModelSource") -> str:
    """The same wherever the same files are served with a configuration that computes the same, else another.

    Reads the whole version folder: not for the event loop's thread. Raises OSError where it is gone.
    """
    digest = blake2b(_deciding(source.config), digest_size=8)
    for path in _files(source.version_folder):
        with path.open("rb") as file:
            content = file_digest(file, "blake2b").digest()
        digest.update(repr((str(path.relative_to(source.version_folder)), content)).encode())
    return digest.hexdigest()


def _deciding(config: ModelConfig) -> bytes:
    kept = ModelConfig()
    kept.CopyFrom(config)
    for field in _NOT_IN_RESPONSES:
        kept.ClearField(field)
    return bytes(kept.SerializeToString(deterministic=True))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
