"""A Llama of two layers with random weights and the bundled model's tokenizer, which is fast and never ends a text."""

import json
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.paths import RILL_TOKENIZER

MAX_MODEL_LEN = 32768
_HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _LAYERS = 32, 64, 2, 1, 2


def write_tiny_checkpoint(folder: Path, head_dim: int = 16) -> Path:
    """Write the checkpoint to `folder`, which must not exist, and return it."""
    shutil.copytree(RILL_TOKENIZER, folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(
        hidden_size=_HIDDEN,
        intermediate_size=_INTERMEDIATE,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=head_dim,
        num_hidden_layers=_LAYERS,
        max_position_embeddings=MAX_MODEL_LEN,
    )
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config["vocab_size"], head_dim), folder / "model.safetensors")
    return folder


def _weights(vocab_size: int, head_dim: int) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return random.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    ones = np.ones(_HIDDEN, np.float32)
    weights = {"model.embed_tokens.weight": matrix(vocab_size, _HIDDEN), "model.norm.weight": ones}
    for layer in range(_LAYERS):
        shapes = {
            "self_attn.q_proj": (_HEADS * head_dim, _HIDDEN),
            "self_attn.k_proj": (_KV_HEADS * head_dim, _HIDDEN),
            "self_attn.v_proj": (_KV_HEADS * head_dim, _HIDDEN),
            "self_attn.o_proj": (_HIDDEN, _HEADS * head_dim),
            "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN),
            "mlp.up_proj": (_INTERMEDIATE, _HIDDEN),
            "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
        }
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        weights |= {f"{prefix}{name}.weight": ones for name in ("input_layernorm", "post_attention_layernorm")}
    return weights
