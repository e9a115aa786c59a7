"""Identifies what the bytes of KV blocks depend on, so that blocks are only used by an engine that would compute the
same ones."""

from collections.abc import Iterator
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from sluice.engine.runners.base import Runner

_FILES = ("*.json", "*.safetensors", "*.bin", "*.xml")
_SAMPLE_BYTES = 1024
_NUM_SAMPLES = 256
"""Pieces of each file that tell it from others: two models of one shape differ in far more than one piece of so
many."""


def block_identity(model_path: str, runner: Runner) -> str:
    """Return a digest, 24 hexadecimal digits, of the model's files (names, sizes, times of the last change) and of what
    else the bytes depend on. It is for engines that come to the same files."""
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in _model_files(model_path)]
    return _digest(runner, stats)


def portable_identity(model_path: str, runner: Runner) -> str:
    """Return a digest as `block_identity` does, of samples of the files' content instead of the times of their change:
    it is the same for copies of a model on several machines."""
    return _digest(runner, content_digest(model_path))


def content_digest(model_path: str) -> str:
    """Return a digest of samples of the content of a model's files."""
    content = blake2b(digest_size=16)
    for path in _model_files(model_path):
        content.update(repr((path.name, path.stat().st_size)).encode())
        for sample in _samples(path):
            content.update(sample)
    return content.hexdigest()


def _digest(runner: Runner, files: object) -> str:
    """Return the digest of the files, the runner's types and layout, the block size, the context length, by which some
    models scale positions, and Sluice's version, whose graphs compute the blocks."""
    info = runner.info
    sizes = (info.block_size, runner.block_bytes, info.max_model_len)
    parts = (version("sluice"), info.runtime, info.model_type, runner.block_identity, sizes, files)
    return blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _model_files(model_path: str) -> list[Path]:
    folder = Path(model_path)
    return sorted({path for pattern in _FILES for path in folder.glob(pattern)}) if model_path else []


def _samples(path: Path) -> Iterator[bytes]:
    """Yield pieces of the file that are evenly spread over it, or all of a small file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _NUM_SAMPLES * _SAMPLE_BYTES:
            yield file.read()
            return
        for number in range(_NUM_SAMPLES):
            file.seek(number * (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)
