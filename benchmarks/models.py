"""S, the model that docs/performance.md compares engines with: a Llama of 8 M random weights."""

import json
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file

Bits = NDArray[np.uint16]

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 256, 8, 8, 4, 32, 688, 8192
INITIALIZER_RANGE = 0.02

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 5,
}


def model_s(folder: Path, tokenizer: Path) -> Path:
    """The checkpoint S in `folder`, made there if it is not yet; needs no torch.

    Its tokenizer is that of the checkpoint `tokenizer`, filled up with made-up words so that every id decodes to text.
    """
    checkpoint = folder / "S"
    if (checkpoint / "model.safetensors").is_file():
        return checkpoint
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "config.json").write_text(json.dumps(CONFIG, indent=2))
    (checkpoint / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 5}))
    _write_tokenizer(checkpoint, tokenizer)
    # Last and by rename: a folder that has it is whole.
    unfinished = checkpoint / "model.unfinished"
    _write_weights(unfinished)
    unfinished.rename(checkpoint / "model.safetensors")
    return checkpoint


def _write_weights(file: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {name: _random_weights(rng, shape) for name, shape in _shapes()}
    specs = {
        name: TensorSpec(dtype="bfloat16", shape=bits.shape, data_ptr=bits.ctypes.data, data_len=bits.nbytes)
        for name, bits in weights.items()  # numpy has no bfloat16, so the library is handed the bare memory
    }
    serialize_file(specs, file, metadata={"format": "pt"})


def _random_weights(rng: np.random.Generator, shape: tuple[int, ...]) -> Bits:
    """bfloat16 as its bits: float32's upper halves, rounded to nearest even. Norms (one dimension) are ones."""
    values = np.ones(shape) if len(shape) == 1 else rng.normal(0.0, INITIALIZER_RANGE, shape)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor by the names that transformers gives them."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield f"{prefix}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)


def _write_tokenizer(checkpoint: Path, source: Path) -> None:
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (checkpoint / name).write_bytes((source / name).read_bytes())
    tokenizer = json.loads((source / "tokenizer.json").read_bytes())
    vocabulary = tokenizer["model"]["vocab"]
    taken = vocabulary.keys() | {token["content"] for token in tokenizer["added_tokens"]}
    size = 1 + max(*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"]))
    new_words = (word for word in _words() if word not in taken)
    vocabulary |= {word: size + i for i, word in enumerate(islice(new_words, VOCABULARY - size))}
    (checkpoint / "tokenizer.json").write_bytes(msgspec.json.encode(tokenizer))


def _words() -> Iterator[str]:
    """Made-up words with the space before them that byte-level vocabularies write as Ġ."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    return ("Ġ" + "".join(parts) for parts in product(syllables, repeat=3))
