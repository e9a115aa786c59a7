"""Writes a Llama checkpoint as a GGUF file in f32: `gguf_worker.py CHECKPOINT FILE`. Needs the package gguf.

llama.cpp's own converter knows tokenizers by a list of hashes, which a small model's is not on.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _tensors(file: Path) -> dict[str, Array]:
    """Return the bfloat16 tensors of a safetensors file as float32."""
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            bits = np.frombuffer(content[begin + first : begin + last], np.uint16)
            found[name] = (bits.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
    return found


def _name(name: str) -> str:
    """Return GGUF's name of a tensor."""
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole:
        return whole[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[part.removesuffix('.weight')]}.weight"


def _interleave(weights: Array, num_heads: int) -> Array:
    """Return the rows in llama.cpp's order, in which the two halves of a rotated head alternate."""
    rows, width = weights.shape
    return weights.reshape(num_heads, 2, rows // num_heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def _add_tokenizer(writer: Any, checkpoint: Path, size: int) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_bytes())
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    words = {number: word for word, number in tokenizer["model"]["vocab"].items()} | special
    kinds = [gguf.TokenType.CONTROL if number in special else gguf.TokenType.NORMAL for number in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words[number] for number in range(size)])
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(5)
    writer.add_add_bos_token(False)


def main(checkpoint: Path, file: Path) -> None:
    """Write the file."""
    config = json.loads((checkpoint / "config.json").read_bytes())
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, checkpoint, config["vocab_size"])
    for name, tensor in _tensors(checkpoint / "model.safetensors").items():
        heads = num_heads if "q_proj" in name else num_kv_heads if "k_proj" in name else 0
        writer.add_tensor(_name(name), _interleave(tensor, heads) if heads else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main(Path(sys.argv[1]), Path(sys.argv[2]))
