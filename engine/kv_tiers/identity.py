"""Identifies what the bytes of KV blocks depend on, so that a file of blocks is only used by an engine that would
compute the same ones."""

from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from engine.runners.base import BlockRunner

_FILES = ("*.json", "*.safetensors", "*.bin", "*.xml")


def block_identity(model_path: str, runner: BlockRunner) -> str:
    """Return a digest, 24 hexadecimal digits, of the model's files (names, sizes, times of the last change), the
    runner's types and layout, the block size, the context length, by which some models scale positions, and Sluice's
    version, whose graphs compute the blocks."""
    folder = Path(model_path)
    files = sorted({path for pattern in _FILES for path in folder.glob(pattern)}) if model_path else []
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    info = runner.info
    sizes = (info.block_size, runner.block_bytes, info.max_model_len)
    parts = (version("sluice"), info.runtime, info.model_type, runner.block_identity, sizes, stats)
    return blake2b(repr(parts).encode(), digest_size=12).hexdigest()
