"""Steps 5 and 8: exports a checkpoint as a `transformers` folder: bf16 weights, tokenizer, chat template."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from training.rill import tokenizer as tokenizer_step
from training.rill.conversation import BOS, CHAT_TEMPLATE, END, PAD, SPECIAL_TOKENS
from training.rill.corpus import WORK
from training.rill.model import Shape

TARGET = Path("models/rill/1")
_IDS = {
    "bos_token_id": SPECIAL_TOKENS.index(BOS),
    "eos_token_id": SPECIAL_TOKENS.index(END),
    "pad_token_id": SPECIAL_TOKENS.index(PAD),
}


def config(shape: Shape) -> dict[str, Any]:
    """Return `config.json` for every `transformers` that knows Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        **_IDS,
    }


def tokenizer_config(shape: Shape) -> dict[str, Any]:
    return {
        # The plain fast tokenizer needs no code of its own, so that old and new versions load it alike.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": shape.max_positions,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def export(work: Path, checkpoint: Path, target: Path) -> None:
    shape = Shape()
    target.mkdir(parents=True, exist_ok=True)
    weights = torch.load(checkpoint, weights_only=True)["model"]
    half = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(half, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
    Tokenizer.from_file(str(tokenizer_step.path(work))).save(str(target / "tokenizer.json"))
    (target / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_json(target / "config.json", config(shape))
    # A model that quotes contexts is at its best with greedy decoding.
    _write_json(target / "generation_config.json", {**_IDS, "do_sample": False})
    _write_json(target / "tokenizer_config.json", tokenizer_config(shape))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=WORK, help="folder with the checkpoint and tokenizer.json")
    parser.add_argument("--target", type=Path, default=TARGET, help="folder of the exported model")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"), help="in that folder, or a path")
    options = parser.parse_args()
    export(options.work, options.work / options.checkpoint, options.target)


if __name__ == "__main__":
    main()
