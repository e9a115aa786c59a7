"""Small checkpoints made from a seed, so that the repository contains the seed and not the weights.

It needs neither torch nor transformers. The random bits come from numpy's PCG64, which is the same on every machine and
in every version.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

_SCALARS = {"beta": 0.5, "eps": -1e-6}
"""Constants of an activation (xIELU) that checkpoints have as tensors."""
_SAFETENSORS_NAMES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}


class Blueprint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a checkpoint is made from. `tensors` has shapes by name."""

    config: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    seed: int
    dtype: str = "f32"
    num_shards: int = 1
    embedding_scale: float = 1.0
    """A small scale for models that scale their embeddings up, so that the output is not an echo of the input."""


def write_checkpoint(blueprint: Blueprint, directory: Path) -> None:
    """Write config.json, the weights and, for several files of weights, their index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(blueprint.config))
    names = sorted(blueprint.tensors)
    if blueprint.num_shards == 1:
        _write_tensors(blueprint, names, directory / "model.safetensors")
        return
    shards = {
        f"model-{i + 1:05}-of-{blueprint.num_shards:05}.safetensors": names[i :: blueprint.num_shards]
        for i in range(blueprint.num_shards)
    }
    for file, shard in shards.items():
        _write_tensors(blueprint, shard, directory / file)
    weight_map = {name: file for file, shard in shards.items() for name in shard}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def random_tensor(blueprint: Blueprint, name: str) -> NDArray[np.float32]:
    """Return random weights. Layers weigh more than embeddings; norms and biases are far from their initial values."""
    shape = blueprint.tensors[name]
    if not shape:
        return np.array(_SCALARS[name.rsplit(".", 1)[-1]], np.float32)
    offset, scale = 0.0, 2 / np.sqrt(shape[-1])
    if ("norm" in name or ".ln_" in name) and name.endswith("weight"):
        offset, scale = 1.0, 0.3
    elif name.endswith("bias"):
        scale = 0.5
    elif "embed_tokens" in name or "embed_in" in name or ".wte." in name:
        scale = blueprint.embedding_scale
    elif "lm_head" in name or "embed_out" in name:
        scale = 1.0
    bits = np.random.PCG64([blueprint.seed, zlib.crc32(name.encode())]).random_raw(int(np.prod(shape)))
    uniform = (bits >> np.uint64(11)) * 2.0**-53
    values: NDArray[np.float64] = offset + scale * np.sqrt(3) * (2 * uniform - 1)
    return values.astype(np.float32).reshape(shape)


def _write_tensors(blueprint: Blueprint, names: list[str], path: Path) -> None:
    """Write the safetensors format directly: numpy has no bf16, so the library's numpy writer has none either."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks, offset = [], 0
    for name in names:
        chunk = _encoded(random_tensor(blueprint, name), blueprint.dtype)
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[blueprint.dtype],
            "shape": blueprint.tensors[name],
            "data_offsets": [offset, offset + len(chunk)],
        }
        chunks.append(chunk)
        offset += len(chunk)
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(chunks))


def _encoded(values: NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype({"f16": np.float16, "f32": np.float32}[dtype]).tobytes()
