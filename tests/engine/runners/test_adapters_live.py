"""LoRA adapters of the OpenVINO runner against transformers with PEFT."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.runners.openvino.runner import load_runner
from tests.engine.scripted_executor import ScriptedExecutor

if not all(map(find_spec, ("torch", "transformers", "peft"))):
    pytest.skip("needs torch, transformers and peft: `make test-torch`", allow_module_level=True)

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.goldens.checkpoints import write_checkpoint
from tests.goldens.families import RECIPES, Recipe
from tests.goldens.models import Continuation, generate_greedily, load_checkpoint

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    # Not every family has a projection for every pattern.
    pytest.mark.filterwarnings("ignore:The following .* keys did not match any targeted module:RuntimeWarning"),
]

# The rope of phi3_long is another one for a short answer of transformers than for a model of its full length.
FAMILIES = {name: each for name, each in RECIPES.items() if each.max_model_len is None and name != "phi3_long"}
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 12, "target_modules": "all-linear"},
    "patterns": {
        "r": 8,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": ["o_proj", "down_proj"],
        "rank_pattern": {"o_proj": 3, r"layers\.1\.mlp\.down_proj": 2},
        "alpha_pattern": {"down_proj": 24},
        "layers_to_transform": [0, 1],
    },
    "regex": {"r": 2, "lora_alpha": 8, "target_modules": r".*\.layers\.[02]\.self_attn\.(o|qkv|q)_proj"},
}
LENGTHS = (1, 20, 50)
CLEAR_MARGIN = 1e-4


def make_adapter(checkpoint: Path, name: str, folder: Path) -> PeftModel:
    """Save an adapter of random matrices. Returns the model with it."""
    fields = dict(ADAPTERS[name])
    base = load_checkpoint(checkpoint)
    modules = {module.rsplit(".", 1)[-1] for module, _ in base.named_modules()}
    if isinstance(fields["target_modules"], list):  # families call some projections otherwise
        fields["target_modules"] = [each for each in fields["target_modules"] if each in modules] or "all-linear"
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **fields))
    generator = np.random.default_rng(len(name))
    with torch.no_grad():
        for parameter_name, parameter in sorted(model.named_parameters()):
            if "lora_" in parameter_name:
                parameter.copy_(torch.from_numpy(generator.standard_normal(tuple(parameter.shape)) * 0.3))
    model.save_pretrained(str(folder))
    model.eval()
    return model


@pytest.mark.parametrize("recipe", FAMILIES.values(), ids=FAMILIES)
def test_several_adapters_in_one_step_generate_peft_s_tokens(recipe: Recipe, tmp_path: Path) -> None:
    checkpoint = tmp_path / "base"
    write_checkpoint(recipe.blueprint(103), checkpoint)
    folders = {name: tmp_path / name for name in ADAPTERS}
    models = {name: make_adapter(checkpoint, name, folder) for name, folder in folders.items()}
    generator = np.random.default_rng(103)
    vocab_size = load_checkpoint(checkpoint).config.get_text_config().vocab_size
    prompts = [generator.integers(6, vocab_size, length).tolist() for length in LENGTHS]
    expected: dict[tuple[str, int], Continuation] = {}
    for name, model in {"": load_checkpoint(checkpoint), **models}.items():
        for number, prompt in enumerate(prompts):
            expected[name, number] = generate_greedily(model, prompt, max_tokens=16)
    assert len({tuple(each.token_ids) for each in expected.values()}) > len(expected) // 2, "adapters change the text"

    config = EngineConfig(
        model_path=str(checkpoint), dtype="f32", num_blocks=100, lora_modules={n: str(f) for n, f in folders.items()}
    )
    runner = load_runner(config)
    engine = ScriptedExecutor(
        runner,  # type: ignore[arg-type]
        lora_modules=config.lora_modules,
        max_num_seqs=32,
        max_num_batched_tokens=64,
    )
    for stream_id, (name, number) in enumerate(expected):
        engine.submit(stream_id, prompts[number], adapter=name, max_tokens=16)
    engine.finish()
    assert not engine.failures
    clear = [i for i, each in enumerate(expected.values()) if each.margin > CLEAR_MARGIN]
    assert len(clear) >= len(expected) // 2
    wanted = list(expected.values())
    assert [engine.tokens[i] for i in clear] == [wanted[i].token_ids for i in clear]
