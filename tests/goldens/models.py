"""Small, randomly initialised transformers models whose likeliest tokens win clearly.

The recording script and the live comparison use them. They need torch and transformers.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

TINY_LLAMA = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    bos_token_id=None,
    eos_token_id=2,
)
"""A model with grouped-query attention, tied embeddings and Llama 3.1's rope."""

TINY_QWEN3 = Qwen3Config(
    vocab_size=192,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=2,
)
"""A model with one key head for each query head, untied embeddings and normed heads."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The greedy continuation of a prompt. `margin` is the least lead of a token over the second best."""

    token_ids: list[int]
    margin: float


def random_model(config: PretrainedConfig, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Make a model whose layers weigh more than its embeddings, so that its output is not an echo of its input."""
    generator = np.random.default_rng(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(torch.from_numpy(_random_weight(generator, name, tuple(parameter.shape))))
    return model.to(dtype)


def _random_weight(generator: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    offset, scale = 0.0, 2 / np.sqrt(shape[-1])
    if "norm" in name:
        offset, scale = 1.0, 0.2
    elif name.endswith("bias"):
        scale = 0.5
    elif "embed_tokens" in name or "lm_head" in name:
        scale = 1.0
    weight: NDArray[np.float64] = offset + scale * generator.standard_normal(shape)
    return weight


def save_checkpoint(model: PreTrainedModel, directory: Path, eos_token_id: int | list[int]) -> None:
    """Write config.json, generation_config.json and model.safetensors."""
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=eos_token_id, pad_token_id=0)
    model.save_pretrained(directory)


def load_checkpoint(directory: Path) -> PreTrainedModel:
    """Load the saved model to compute in float32, whatever its stored type.

    It uses transformers' eager attention, the only implementation with Gemma 2's softcap.
    """
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def generate_greedily(
    model: PreTrainedModel, prompt: list[int], max_tokens: int, repetition_penalty: float = 1.0
) -> Continuation:
    """Run transformers' `generate`. It ends after `max_tokens` or with an end-of-sequence token."""
    input_ids = torch.tensor([prompt])
    with torch.no_grad():
        result = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            repetition_penalty=repetition_penalty,
            output_scores=True,
            return_dict_in_generate=True,
        )
    best = torch.stack([scores[0] for scores in result.scores]).topk(2).values
    return Continuation(result.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min()))


def worst_choice(model: PreTrainedModel, prompt: list[int], token_ids: list[int]) -> float:
    """Return the most by which a likelier token leads one of `token_ids`, each after the prompt and those before it."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + token_ids[:-1]])).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    return float((logits.amax(1) - chosen).max())
