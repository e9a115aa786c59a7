"""The models of the comparison in docs/performance.md: S, a Llama of 8 M, and M, of Qwen3-0.6B's shape with 0.47 B: its
vocabulary is smaller.

Their weights are random. They are made without torch, in a second (S) or half a minute (M).
"""

import json
from collections.abc import Iterator, Mapping
from itertools import islice, product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file

Bits = NDArray[np.uint16]
Config = dict[str, Any]

INITIALIZER_RANGE = 0.02

COMMON: Config = {
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 5,
}

S: Config = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "mlp_bias": False,
}

M: Config = COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}

QWEN3_0_6B: Config = M | {"vocab_size": 151_936}


def model_s(folder: Path, tokenizer: Path) -> Path:
    """Return the checkpoint S in `folder`. It is made there where it does not exist.

    Its tokenizer is that of the checkpoint `tokenizer`, filled up with made-up words so that every id decodes to text.
    """
    return _checkpoint(folder / "S", S, tokenizer)


def build_m(folder: Path, tokenizer: Path) -> Path:
    """Return the checkpoint M (0.94 GB) in `folder`, made there as `model_s` makes S."""
    return _checkpoint(folder / "M", M, tokenizer)


def _checkpoint(checkpoint: Path, config: Config, tokenizer: Path) -> Path:
    if (checkpoint / "model.safetensors").is_file():
        return checkpoint
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "config.json").write_text(json.dumps(config, indent=2))
    (checkpoint / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 5}))
    write_tokenizer(checkpoint, tokenizer, config["vocab_size"])
    # Last and by rename: a folder that has the file is complete.
    unfinished = checkpoint / "model.unfinished"
    _write_weights(unfinished, config)
    unfinished.rename(checkpoint / "model.safetensors")
    return checkpoint


def _write_weights(file: Path, config: Config) -> None:
    rng = np.random.default_rng(0)
    weights = {name: _random_weights(rng, shape) for name, shape in tensor_shapes(config)}
    specs = {
        name: TensorSpec(dtype="bfloat16", shape=bits.shape, data_ptr=bits.ctypes.data, data_len=bits.nbytes)
        for name, bits in weights.items()  # numpy has no bfloat16, so the library is handed the bare memory
    }
    serialize_file(specs, file, metadata={"format": "pt"})


def _random_weights(rng: np.random.Generator, shape: tuple[int, ...]) -> Bits:
    """Return bfloat16 bits: the upper halves of float32, rounded to nearest even. Norms (one dimension) are ones."""
    values = np.ones(shape) if len(shape) == 1 else rng.normal(0.0, INITIALIZER_RANGE, shape)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name, as transformers has it, and the shape of every tensor."""
    hidden, wide, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (query, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, query)
        if config["model_type"] == "qwen3":
            yield f"{prefix}.self_attn.q_norm.weight", (head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (head_dim,)
        yield f"{prefix}.mlp.gate_proj.weight", (wide, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (wide, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, wide)


def write_tokenizer(checkpoint: Path, source: Path, vocab_size: int) -> None:
    """Copy the tokenizer of the checkpoint `source`, filled up with made-up words to a size."""
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (checkpoint / name).write_bytes((source / name).read_bytes())
    tokenizer = json.loads((source / "tokenizer.json").read_bytes())
    vocabulary = tokenizer["model"]["vocab"]
    taken = vocabulary.keys() | {token["content"] for token in tokenizer["added_tokens"]}
    size = 1 + max(*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"]))
    new_words = (word for word in _words() if word not in taken)
    vocabulary |= {word: size + i for i, word in enumerate(islice(new_words, vocab_size - size))}
    (checkpoint / "tokenizer.json").write_bytes(msgspec.json.encode(tokenizer))


def _words() -> Iterator[str]:
    """Yield made-up words, with the space before them that byte-level vocabularies write as Ġ."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    return ("Ġ" + "".join(parts) for parts in product(syllables, repeat=3))
