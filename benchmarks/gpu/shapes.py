"""The models that are measured: their shapes, random weights, and the least time that a step of theirs takes."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.parts import Setting, figures_of
from benchmarks.models import COMMON, QWEN3_0_6B, S, tensor_shapes, write_tokenizer

TOKENIZER = Path(__file__).parents[2] / "models" / "rill" / "1"
_RANDOM_BYTES = 256 << 20
_ONE = bytes((0x80, 0x3F))
"""1.0 in bfloat16."""

LLAMA_3_8B: dict[str, Any] = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8448,
    "rms_norm_eps": 1e-5,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of random weights in bf16."""

    name: str
    config: Mapping[str, Any]

    @property
    def read_elements(self) -> int:
        """Weights that a decode step reads: all but the embedding, of which it takes a row for each token."""
        sizes = {name: math.prod(size) for name, size in tensor_shapes(self.config)}
        embedding = 0 if self.config["tie_word_embeddings"] else sizes["model.embed_tokens.weight"]
        return sum(sizes.values()) - embedding

    @property
    def cached_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        config = self.config
        return int(4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])

    @property
    def head_elements(self) -> int:
        return int(self.config["vocab_size"]) * int(self.config["hidden_size"])


def large(setting: Setting) -> Shape:
    return Shape("S", S) if setting.is_tiny else Shape("8B", LLAMA_3_8B)


def small(setting: Setting) -> Shape:
    return Shape("S", S) if setting.is_tiny else Shape("0.6B", QWEN3_0_6B)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The rates that the part `ceilings` has measured."""

    bytes_per_s: float
    flops: float

    @classmethod
    def read(cls, setting: Setting) -> "Ceilings | None":
        """Return None where that part has not run."""
        figures = figures_of(setting, "ceilings")
        if "memory" not in figures or "bf16 product" not in figures:
            return None
        rates = figures["memory"]
        return cls(1e12 * max(rates["read_TB_s"], rates["copy_TB_s"]), 1e12 * figures["bf16 product"]["TFLOP_s"])

    def decode_s(self, shape: Shape, batch: int, context: int) -> float:
        """Return the least seconds of a step: weights are read or multiplied, and each sequence's cache is read."""
        weights = shape.read_elements
        products = max(2 * weights / self.bytes_per_s, 2 * batch * weights / self.flops)
        return products + batch * context * shape.cached_bytes / self.bytes_per_s

    def prefill_s(self, shape: Shape, length: int) -> float:
        """Return the least seconds of a prompt: products of all tokens, and attention of each with those before it."""
        config = shape.config
        pairs = length * length / 2
        attention = 4 * pairs * config["num_attention_heads"] * config["head_dim"] * config["num_hidden_layers"]
        return float((2 * length * (shape.read_elements - shape.head_elements) + attention) / self.flops)


def share_of_limit(setting: Setting, seconds: float, least_s: Callable[[Ceilings], float]) -> dict[str, float]:
    """Return how much of a measured time it would take at least, if the ceilings are known."""
    ceilings = Ceilings.read(setting)
    return {} if ceilings is None else {"of_limit": least_s(ceilings) / seconds}


def folder_of(shape: Shape, setting: Setting) -> Path:
    """Return a folder with the shape's config.json and tokenizer, but without weights."""
    return _write_folder(shape, setting.work / f"{shape.name}-empty")


def checkpoint_of(shape: Shape, setting: Setting) -> Path:
    """Return a checkpoint with random weights, made where an earlier part has not."""
    folder = _write_folder(shape, setting.work / shape.name)
    weights = folder / "model.safetensors"
    if not weights.is_file():
        unfinished = folder / "unfinished"
        _write_weights(unfinished, shape)
        unfinished.rename(weights)
    return folder


def _write_folder(shape: Shape, folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_tokenizer(folder, TOKENIZER, shape.config["vocab_size"])
        (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 5}))
        (folder / "config.json").write_text(json.dumps(shape.config, indent=2))
    return folder


def _write_weights(file: Path, shape: Shape) -> None:
    """Write the safetensors format as fast as the disk takes it: every matrix is a piece of the same random bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    sizes, offset = [], 0
    for name, size in tensor_shapes(shape.config):
        sizes.append((2 * math.prod(size), len(size) == 1))
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [offset, offset + sizes[-1][0]]}
        offset += sizes[-1][0]
    head = json.dumps(header).encode()
    random, place = _random_bytes(min(_RANDOM_BYTES, max(size for size, _ in sizes))), 0
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for num_bytes, is_norm in sizes:
            left = num_bytes - (out.write(_ONE * (num_bytes // 2)) if is_norm else 0)
            while left:
                written = out.write(random[place : place + left])
                left, place = left - written, (place + written) % len(random)


def _random_bytes(size: int) -> memoryview:
    """Return bfloat16 numbers between ±0.0156 and ±0.0312: a random sign and fraction, and always the same exponent."""
    bits = np.frombuffer(np.random.default_rng(0).bytes(size), np.uint16)
    return memoryview(((bits & 0x807F) | 0x3C80).tobytes())
