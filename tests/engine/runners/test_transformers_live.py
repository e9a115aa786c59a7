"""The OpenVINO runner against transformers itself, on weights and shapes that the goldens lack."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from sluice.engine.config import EngineConfig, Task
from sluice.engine.runners.openvino.runner import load_runner
from tests.engine.runners.drive import Driver, Prompt, prefill
from tests.engine.runners.family_goldens import NAMES, read_family

if find_spec("torch") is None or find_spec("transformers") is None:
    pytest.skip("needs torch and transformers: `make test-torch`", allow_module_level=True)

import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from tests.goldens.checkpoints import write_checkpoint
from tests.goldens.models import load_checkpoint, random_model, save_checkpoint, worst_choice

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

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
FAMILIES = [name for name in NAMES if read_family(name).max_model_len is None]
"""Excludes families whose ropes depend on the length of each call in transformers."""
NEAR = 1e-4
"""Ten times the difference of float32 sums in another order."""


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_no_token_is_likelier_to_transformers_than_ours(config: PretrainedConfig, tmp_path: Path) -> None:
    model = random_model(config, seed=11)
    save_checkpoint(model, tmp_path, eos_token_id=5)
    generator = np.random.default_rng(11)
    prompts = [generator.integers(6, 300, length).tolist() for length in (1, 30, 64, 150, 300)]
    runner = load_runner(EngineConfig(model_path=str(tmp_path), dtype="f32", num_blocks=100, num_threads=1))
    asked = [Prompt(prompt, max_tokens=32) for prompt in prompts]
    for prompt, answer in zip(prompts, Driver(runner, chunk_sizes=(1, 13, 64), seed=11).generate(asked), strict=True):
        assert len(answer) == 32 or answer[-1] == 5
        assert worst_choice(model, prompt, answer) < NEAR


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_hidden_states_are_transformers_in_every_family(name: str, tmp_path: Path) -> None:
    write_checkpoint(replace(read_family(name).blueprint, seed=101), tmp_path)
    model, length = load_checkpoint(tmp_path), 200
    prompt = np.random.default_rng(101).integers(6, model.config.get_text_config().vocab_size, length).tolist()
    with torch.no_grad():
        ids = torch.tensor([prompt])
        expected = {Task.GENERATE: model(ids).logits[0], Task.EMBED: model.base_model(ids).last_hidden_state[0]}
    for task, values in expected.items():
        config = EngineConfig(model_path=str(tmp_path), dtype="f32", num_blocks=10, num_threads=1, task=task)
        runner = load_runner(config)
        found = prefill(runner, prompt, list(range(length)))
        assert found.shape == values.shape
        assert np.abs(found - values.numpy()).max() < 3 * NEAR * float(values.abs().max())
