"""Records what transformers generates from a small model of every family. `make goldens` runs it.

A golden has the blueprint that it is recorded from. `python -m tests.goldens.record_families NAME...` records only the
named families, and `... new NAME '{"model_type": "olmo2", "head_dim": 12}' [EDITS]` begins one and records it.
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
from msgspec.structs import replace
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests import paths
from tests.goldens.checkpoints import Blueprint, write_checkpoint
from tests.goldens.models import generate_greedily, load_checkpoint

DATA = paths.DATA / "families"
LEAST_MARGIN = 2e-3
"""Float32 sums in another order differ by some 1e-5. A token that wins by less than this proves nothing."""
MAX_SEEDS = 40
SHAPE: dict[str, Any] = {
    "vocab_size": 144,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class Case(msgspec.Struct, frozen=True):
    """A prompt of a golden. Its tokens are drawn anew."""

    prompt_token_ids: list[int]
    max_tokens: int


class Known(msgspec.Struct, frozen=True):
    """The source of a golden. `max_model_len` is passed to the runner where it is not the default."""

    blueprint: Blueprint
    max_model_len: int | None
    cases: list[Case]


def record(name: str) -> None:
    """Write one golden anew, with the first seed whose tokens all win clearly and whose outputs are not too short."""
    path = DATA / f"{name}.json"
    known = msgspec.json.decode(path.read_bytes(), type=Known)
    for seed in range(MAX_SEEDS):
        blueprint = replace(known.blueprint, seed=seed)
        golden = _golden(blueprint, known)
        shortest = min(len(case["token_ids"]) for case in golden["cases"])
        if golden["margin"] > LEAST_MARGIN and shortest > known.cases[0].max_tokens // 2:
            _write(path, blueprint, golden)
            return
    raise ValueError(f"{name}: no seed below {MAX_SEEDS} under which every token wins by {LEAST_MARGIN}")


def begin(name: str, fields: dict[str, Any], edits: dict[str, Any]) -> None:
    """Write what `record` needs of a new family: a model of SHAPE with other `fields`. `edits` change the config.json
    that transformers saves; None removes a field. The blueprint's type of weights, its files and the lengths of the
    prompts may be edited in the file."""
    config = AutoConfig.for_model(**{**SHAPE, **fields})
    saved = {**json.loads(config.to_json_string()), **edits}
    left_out = {name for name, value in edits.items() if value is None}
    blueprint = Blueprint(
        config={name: value for name, value in saved.items() if name not in left_out},
        tensors=_saved_shapes(AutoModelForCausalLM.from_config(config)),
        seed=0,
    )
    cases = [{"prompt_token_ids": [0] * length, "max_tokens": 12} for length in (1, 33, 60, 90)]
    _write(DATA / f"{name}.json", blueprint, {"max_model_len": None, "cases": cases})


def _saved_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors under the names that a checkpoint has, which may not be the modules'."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        with safe_open(Path(directory) / "model.safetensors", framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}


def _golden(blueprint: Blueprint, known: Known) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(blueprint, Path(directory))
        model = load_checkpoint(Path(directory))
    random = np.random.default_rng(blueprint.seed)
    vocab_size = blueprint.config["vocab_size"]
    prompts = [random.integers(3, vocab_size, len(case.prompt_token_ids)).tolist() for case in known.cases]
    results = [generate_greedily(model, prompt, known.cases[0].max_tokens) for prompt in prompts]
    cases = [
        {"prompt_token_ids": prompt, "max_tokens": known.cases[0].max_tokens, "token_ids": result.token_ids}
        for prompt, result in zip(prompts, results, strict=True)
    ]
    return {
        "max_model_len": known.max_model_len,
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
    names = sys.argv[1:] or [file.stem for file in sorted(DATA.glob("*.json"))]
    if names[0] == "new":
        begin(names[1], *map(json.loads, [*names[2:], "{}"][:2]))
        names = names[1:2]
    for name in names:
        record(name)
