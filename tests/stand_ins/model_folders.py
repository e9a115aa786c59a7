"""Folders of models without weights, as the stand-in for TensorRT-LLM reads them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.paths import DATA

_CHECKPOINT = DATA / "checkpoints" / "llama_tiny"
_TOKENIZER = DATA / "tokenizers" / "rill"

VOCAB_SIZE = 4096
MAX_POSITIONS = 1024
EOS = 2
HIDDEN_SIZE = 64

BUILT = {
    "max_input_len": 512,
    "max_seq_len": 768,
    "max_batch_size": 8,
    "max_beam_width": 1,
    "max_num_tokens": 1024,
    "gather_context_logits": True,
    "plugin_config": {"tokens_per_block": 32, "paged_kv_cache": True, "use_paged_context_fmha": True},
}
"""A compiled engine's limits."""


def make_checkpoint(folder: Path, *, with_tokenizer: bool = False, **config: Any) -> Path:
    """A HuggingFace checkpoint; `config` goes over what its config.json says."""
    folder.mkdir(parents=True)
    told = json.loads((_CHECKPOINT / "config.json").read_text())
    told |= {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_POSITIONS, "eos_token_id": EOS, **config}
    _write(folder / "config.json", told)
    _write(folder / "generation_config.json", {"eos_token_id": told["eos_token_id"]})
    if with_tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(_TOKENIZER / name, folder / name)
    return folder


def make_seeing_checkpoint(folder: Path) -> Path:
    """A checkpoint of a model of text and images, with a chat template that takes text alone."""
    make_checkpoint(folder, with_tokenizer=True, model_type="seeing", vocab_size=VOCAB_SIZE + 1)
    told = json.loads((folder / "tokenizer.json").read_text())
    told["added_tokens"].append({**told["added_tokens"][-1], "id": VOCAB_SIZE, "content": "<|image|>"})
    _write(folder / "tokenizer.json", told)
    return folder


def make_adapter(folder: Path, rank: int = 8, modules: Sequence[str] = ("q_proj", "v_proj"), seed: int = 0) -> str:
    """An adapter of the checkpoint, as PEFT writes it; its name is the folder's. Another `seed` is another adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [*modules]}
    _write(folder / "adapter_config.json", told)
    shapes = {"A": (rank, HIDDEN_SIZE), "B": (HIDDEN_SIZE, rank)}
    weights = {
        f"base_model.model.model.layers.0.self_attn.{name}.lora_{side}.weight": np.full(shape, seed, np.float32)
        for name in modules
        for side, shape in shapes.items()
    }
    save_file(weights, folder / "adapter_model.safetensors")
    return str(folder)


def make_converted_checkpoint(folder: Path) -> Path:
    """A checkpoint in TensorRT-LLM's own format."""
    folder.mkdir(parents=True)
    _write(folder / "config.json", _converted_config())
    (folder / "rank0.safetensors").touch()
    return folder


def make_compiled_engine(folder: Path, **build: Any) -> Path:
    """A compiled engine's folder; `build` goes over its limits."""
    folder.mkdir(parents=True)
    told = {"version": "1.2.1", "pretrained_config": _converted_config(), "build_config": {**BUILT, **build}}
    _write(folder / "config.json", told)
    (folder / "rank0.engine").touch()
    return folder


def _converted_config() -> dict[str, Any]:
    return {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    }


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
