"""LoRA adapters of the OpenVINO runner against transformers with PEFT."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from sluice.engine.config import EngineConfig
from sluice.engine.runners.openvino.runner import load_runner
from tests.engine.runners.family_goldens import NAMES, read_family
from tests.engine.scripted_executor import ScriptedExecutor

if not all(map(find_spec, ("torch", "transformers", "peft"))):
    pytest.skip("needs torch, transformers and peft: `make test-torch`", allow_module_level=True)

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers.pytorch_utils import Conv1D

from tests.goldens.checkpoints import write_checkpoint
from tests.goldens.models import load_checkpoint, worst_choice

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    # Not every family has a projection for every pattern.
    pytest.mark.filterwarnings("ignore:The following .* keys did not match any targeted module:RuntimeWarning"),
]

torch.set_num_threads(1)
# The rope of phi3_long is another one for a short answer of transformers than for a model of its full length.
FAMILIES = [name for name in NAMES if read_family(name).max_model_len is None and name != "phi3_long"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 12},
    "patterns": {
        "r": 8,
        "lora_alpha": 4,
        "use_rslora": True,
        "rank_pattern": {"o_proj": 3, r"layers\.1\.mlp\.down_proj": 2},
        "alpha_pattern": {"down_proj": 24},
        "layers_to_transform": [0, 1],
    },
    "regex": {
        "r": 2,
        "lora_alpha": 8,
        "target_modules": (
            r".*\.(layers|h)\.[02]\.(self_attn|attn|attention|conv)\."
            r"(o_proj|qkv_proj|q_proj|out_proj|c_attn|query_key_value)"
        ),
    },
}
OUTPUT_PROJECTIONS = {"o_proj", "down_proj", "out_proj", "dense", "dense_4h_to_h", "c_proj", "w2", "fc2"}
FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""What PEFT takes for the parameters of routed experts in families that have any."""
LENGTHS = (1, 20, 50)
NEAR = 1e-4
"""Ten times the difference of float32 sums in another order."""


def name_projections(model: torch.nn.Module) -> set[str]:
    """Name the linear layers that an adapter of every family can target.

    PEFT's own "all-linear" takes routers and fused experts too, which are parameters and no linear layers.
    """
    kinds = {type(module).__name__ for _, module in model.named_modules()}
    names = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if type(module) in (torch.nn.Linear, Conv1D) and name != "lm_head"  # some routers are subclasses
    }
    has_experts = any(kind.lower().endswith(("router", "experts")) for kind in kinds)
    return names - FEED_FORWARD - {"gate"} if has_experts else names


def make_adapter(checkpoint: Path, name: str, folder: Path) -> PeftModel:
    """Save an adapter of random matrices. Returns the model with it."""
    fields = dict(ADAPTERS[name])
    base = load_checkpoint(checkpoint)
    projections = name_projections(base)
    if name == "patterns":
        projections &= OUTPUT_PROJECTIONS
    fields.setdefault("target_modules", sorted(projections))
    is_transposed = any(isinstance(module, Conv1D) for module in base.modules())
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=is_transposed, **fields))
    assert not model.peft_config["default"].target_parameters
    generator = np.random.default_rng(len(name))
    with torch.no_grad():
        for parameter_name, parameter in sorted(model.named_parameters()):
            if "lora_" in parameter_name:
                parameter.copy_(torch.from_numpy(generator.standard_normal(tuple(parameter.shape)) * 0.3))
    model.save_pretrained(str(folder))
    model.eval()
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_several_adapters_in_one_step_choose_what_peft_would(family: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "base"
    write_checkpoint(replace(read_family(family).blueprint, seed=103), checkpoint)
    folders = {name: tmp_path / name for name in ADAPTERS}
    models = {"": load_checkpoint(checkpoint)}
    models |= {name: make_adapter(checkpoint, name, folder) for name, folder in folders.items()}
    generator = np.random.default_rng(103)
    vocab_size = models[""].config.get_text_config().vocab_size
    prompts = [generator.integers(6, vocab_size, length).tolist() for length in LENGTHS]
    asked = [(name, prompt) for name in models for prompt in prompts]
    config = EngineConfig(
        model_path=str(checkpoint),
        dtype="f32",
        num_blocks=100,
        num_threads=1,
        lora_modules={n: str(f) for n, f in folders.items()},
    )
    engine = ScriptedExecutor(
        load_runner(config),  # type: ignore[arg-type]
        lora_modules=config.lora_modules,
        max_num_seqs=32,
        max_num_batched_tokens=64,
    )
    for stream_id, (name, prompt) in enumerate(asked):
        engine.submit(stream_id, prompt, adapter=name, max_tokens=16, ignore_eos=True)
    engine.finish()
    assert not engine.failures
    assert len({tuple(each) for each in engine.tokens.values()}) > len(asked) // 2, "adapters change the text"
    for stream_id, (name, prompt) in enumerate(asked):
        assert worst_choice(models[name], prompt, engine.tokens[stream_id]) < NEAR
