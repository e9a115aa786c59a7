"""Records what transformers generates from a small model of every family. `make goldens` runs it.

`python -m tests.goldens.record_families NAME...` records only the named families.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from tests import paths
from tests.goldens.checkpoints import Blueprint, write_checkpoint
from tests.goldens.families import RECIPES, Recipe
from tests.goldens.models import generate_greedily, load_checkpoint

DATA = paths.DATA / "families"
LEAST_MARGIN = 2e-3
"""Float32 sums in another order differ by some 1e-5. A token that wins by less than this proves nothing."""
MAX_SEEDS = 40


def record(name: str, recipe: Recipe) -> None:
    """Write one golden, with the first seed whose tokens all win clearly and whose outputs are not too short."""
    for seed in range(MAX_SEEDS):
        blueprint = recipe.blueprint(seed)
        golden = _golden(blueprint, recipe)
        shortest = min(len(case["token_ids"]) for case in golden["cases"])
        if golden["margin"] > LEAST_MARGIN and shortest > recipe.max_tokens // 2:
            _write(DATA / f"{name}.json", blueprint, golden)
            return
    raise ValueError(f"{name}: no seed below {MAX_SEEDS} under which every token wins by {LEAST_MARGIN}")


def _golden(blueprint: Blueprint, recipe: Recipe) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(blueprint, Path(directory))
        model = load_checkpoint(Path(directory))
    random = np.random.default_rng(blueprint.seed)
    prompts = [random.integers(3, blueprint.config["vocab_size"], length).tolist() for length in recipe.lengths]
    results = [generate_greedily(model, prompt, recipe.max_tokens) for prompt in prompts]
    cases = [
        {"prompt_token_ids": prompt, "max_tokens": recipe.max_tokens, "token_ids": result.token_ids}
        for prompt, result in zip(prompts, results, strict=True)
    ]
    return {
        "max_model_len": recipe.max_model_len,
        "margin": min(result.margin for result in results),
        "cases": cases,
        "logits": _logits(model, prompts[-1]),
    }


def _logits(model: PreTrainedModel, prompt: list[int]) -> list[list[float]]:
    """Return the logits of the prompt's middle and last token."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0]
    return [[float(f"{value:.6g}") for value in logits[row].tolist()] for row in (len(prompt) // 2, -1)]


def _write(path: Path, blueprint: Blueprint, golden: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    parts = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "blueprint": msgspec.to_builtins(blueprint),
        **golden,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in parts.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    for name in sys.argv[1:] or RECIPES:
        record(name, RECIPES[name])
