"""LoRA adapters with random weights, and checkpoints that have them merged in."""

import json
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

RANK = 4
ALPHA = 8
TARGETS = ("q_proj", "v_proj", "down_proj")


def make_adapter(checkpoint: Path, folder: Path, seed: int) -> Path:
    """Write an adapter in PEFT's form that changes what the model says."""
    draw = np.random.default_rng(seed)
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for name, shape in _targets(checkpoint).items():
        at = f"base_model.model.{name}"
        weights[f"{at}.lora_A.weight"] = draw.normal(0, 0.3, (RANK, shape[1])).astype(np.float32)
        weights[f"{at}.lora_B.weight"] = draw.normal(0, 0.3, (shape[0], RANK)).astype(np.float32)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "rill", "r": RANK,
        "lora_alpha": ALPHA, "target_modules": list(TARGETS), "bias": "none",
    }  # fmt: skip
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def merge(checkpoint: Path, adapter: Path, folder: Path) -> Path:
    """Write the checkpoint with the adapter in its weights: W + B A alpha / r."""
    shutil.copytree(checkpoint, folder)
    weights, lora = _load(checkpoint), load_file(adapter / "adapter_model.safetensors")
    for name in _targets(checkpoint):
        at = f"base_model.model.{name}"
        delta = lora[f"{at}.lora_B.weight"] @ lora[f"{at}.lora_A.weight"]
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + delta * (ALPHA / RANK)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32", "torch_dtype": "float32"}))
    return folder


def _targets(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    shapes = {name.removesuffix(".weight"): weight.shape for name, weight in _load(checkpoint).items()}
    return {name: shape for name, shape in shapes.items() if name.rsplit(".", 1)[-1] in TARGETS}


def _load(checkpoint: Path) -> dict[str, npt.NDArray[np.float32]]:
    return {name: weight.astype(np.float32) for name, weight in load_file(checkpoint / "model.safetensors").items()}
