"""The OpenVINO runner against transformers itself, on weights and shapes that the goldens lack."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig, Task
from engine.runners.openvino.runner import load_runner
from tests.engine.runners.drive import Driver, Prompt, prefill

if find_spec("torch") is None or find_spec("transformers") is None:
    pytest.skip("needs torch and transformers: `make test-torch`", allow_module_level=True)

import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from tests.goldens.checkpoints import write_checkpoint
from tests.goldens.families import RECIPES, Recipe
from tests.goldens.models import (
    Continuation,
    generate_greedily,
    load_checkpoint,
    random_model,
    save_checkpoint,
)

pytestmark = pytest.mark.torch

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {
    "llama-biased": LlamaConfig(
        **SHAPE,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
    ),
    "qwen3-grouped": Qwen3Config(
        **SHAPE, num_attention_heads=8, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True
    ),
}
FAMILIES = {name: recipe for name, recipe in RECIPES.items() if recipe.max_model_len is None}
"""Excludes families whose ropes depend on the length of each call in transformers."""
CLEAR_MARGIN = 1e-4
"""Ten times the difference of float32 sums in another order."""


@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_same_tokens(config: PretrainedConfig, seed: int, tmp_path: Path) -> None:
    save_checkpoint(random_model(config, seed), tmp_path, eos_token_id=5)
    check_same_tokens(tmp_path, seed)


@pytest.mark.parametrize("seed", [101])
@pytest.mark.parametrize("recipe", FAMILIES.values(), ids=FAMILIES)
def test_same_tokens_in_every_family(recipe: Recipe, seed: int, tmp_path: Path) -> None:
    write_checkpoint(recipe.blueprint(seed), tmp_path)
    check_same_tokens(tmp_path, seed, lengths=(recipe.lengths[0], 50, 90, 150, 200))


@pytest.mark.parametrize("recipe", FAMILIES.values(), ids=FAMILIES)
def test_same_hidden_states_in_every_family(recipe: Recipe, tmp_path: Path) -> None:
    write_checkpoint(recipe.blueprint(102), tmp_path)
    model = load_checkpoint(tmp_path)
    prompt = np.random.default_rng(102).integers(6, model.config.get_text_config().vocab_size, 90).tolist()
    runner = load_runner(EngineConfig(model_path=str(tmp_path), dtype="f32", num_blocks=10, task=Task.EMBED))
    found = prefill(runner, prompt, list(range(90)))
    assert found.shape == (90, runner.info.embedding_size)
    with torch.no_grad():
        expected = model.base_model(input_ids=torch.tensor([prompt])).last_hidden_state[0].numpy()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def check_same_tokens(directory: Path, seed: int, lengths: Sequence[int] = (1, 30, 64, 150, 300, 300)) -> None:
    expected = clear_continuations(directory, seed, lengths)
    runner = load_runner(EngineConfig(model_path=str(directory), dtype="f32", num_blocks=100))
    prompts = [Prompt(prompt, max_tokens=32) for prompt, _ in expected]
    generated = Driver(runner, chunk_sizes=(1, 13, 64), seed=seed).generate(prompts)
    assert generated == [continuation.token_ids for _, continuation in expected]


def clear_continuations(directory: Path, seed: int, lengths: Sequence[int]) -> list[tuple[list[int], Continuation]]:
    """Return prompts and their continuations, except those with nearly tied tokens."""
    model, generator = load_checkpoint(directory), np.random.default_rng(seed)
    prompts = [generator.integers(6, model.config.vocab_size, length).tolist() for length in lengths]
    pairs = [(prompt, generate_greedily(model, prompt, max_tokens=32)) for prompt in prompts]
    clear = [(prompt, continuation) for prompt, continuation in pairs if continuation.margin > CLEAR_MARGIN]
    assert len(clear) >= len(prompts) // 2, "random weights without favourites: nothing to compare"
    return clear
