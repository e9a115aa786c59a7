"""The time of a layer of experts in its two forms (`engine/runners/openvino/graph/experts.py`), for 1 to 512 tokens.

The layer is the only one of a random model, with attention of one small head, so that nearly all of a step is its
experts.
"""

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
from safetensors.numpy import save_file

from benchmarks.figures import Figure
from sluice.engine.config import EngineConfig
from sluice.engine.runners.base import Runner, StepBatch
from sluice.engine.runners.openvino.graph import experts
from sluice.engine.runners.openvino.runner import load_runner

NUM_STEPS = 7
VOCAB_SIZE = 64
FORMS = {"one after the other": 1 << 30, "gathered": 0}
"""The forms, and the number of experts up to which they are few."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer: experts of `size` features, of which each token passes through `num_chosen`."""

    num_experts: int
    num_chosen: int
    hidden_size: int
    size: int

    def __str__(self) -> str:
        return f"{self.num_experts} experts of {self.hidden_size} x {self.size}, {self.num_chosen} chosen"


SHAPES = (Shape(8, 2, 1024, 3584), Shape(16, 2, 1024, 2048), Shape(32, 4, 1024, 768), Shape(64, 8, 2048, 768))
NUM_TOKENS = (1, 4, 32, 128, 512)


def measure(
    num_repeats: int, shapes: tuple[Shape, ...] = SHAPES, quantizations: tuple[str, ...] = ("none", "int8")
) -> list[Figure]:
    """Measure the steps of each form for each shape and number of tokens."""
    return [
        figure
        for shape in shapes
        for quantization in quantizations
        for form in FORMS
        for figure in _of_form(shape, quantization, form, num_repeats)
    ]


def _of_form(shape: Shape, quantization: str, form: str, num_repeats: int) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder, patch.object(experts, "FEW_EXPERTS", FORMS[form]):
        write_model(shape, Path(folder))
        config = EngineConfig(model_path=folder, cache_path=folder, quantization=quantization, num_blocks=20)
        runner = load_runner(config)
        for num_tokens in NUM_TOKENS:
            samples = tuple(_step_ms(runner, num_tokens) for _ in range(num_repeats))
            yield Figure(f"{shape}, {quantization}", f"{form}, {num_tokens} tokens", "ms", samples)
        runner.close()


def write_model(shape: Shape, folder: Path) -> None:
    """Write the checkpoint of a Mixtral of one layer."""
    config = {
        "model_type": "mixtral",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.size,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": max(NUM_TOKENS),
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_chosen,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(0)
    tensors = {
        name: (generator.standard_normal(size, np.float32) / np.sqrt(size[-1])).astype(np.float16)
        for name, size in _tensors(shape)
    }
    save_file(tensors, folder / "model.safetensors")


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, layer = shape.hidden_size, "model.layers.0"
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", (VOCAB_SIZE, hidden)
    for name in ("model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"):
        yield f"{name}.weight", (hidden,)
    for letter in "qkv":
        yield f"{layer}.self_attn.{letter}_proj.weight", (16, hidden)
    yield f"{layer}.self_attn.o_proj.weight", (hidden, 16)
    yield f"{layer}.block_sparse_moe.gate.weight", (shape.num_experts, hidden)
    for expert in range(shape.num_experts):
        name = f"{layer}.block_sparse_moe.experts.{expert}"
        yield f"{name}.w1.weight", (shape.size, hidden)
        yield f"{name}.w3.weight", (shape.size, hidden)
        yield f"{name}.w2.weight", (hidden, shape.size)


def _step_ms(runner: Runner, num_tokens: int) -> float:
    """Return the median milliseconds of a prefill of random tokens."""
    token_ids = np.random.default_rng(num_tokens).integers(0, VOCAB_SIZE, num_tokens).astype(np.int32)
    num_blocks = -(-num_tokens // runner.info.block_size)
    batch = StepBatch(
        token_ids=token_ids,
        position_ids=np.arange(num_tokens, dtype=np.int32),
        past_lens=np.zeros(1, np.int32),
        subsequence_begins=np.array([0, num_tokens], np.int32),
        block_indices=np.arange(num_blocks, dtype=np.int32),
        block_indices_begins=np.array([0, num_blocks], np.int32),
        sampled_rows=np.array([num_tokens - 1], np.int32),
        max_context_len=num_tokens,
    )
    seconds = []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        runner.run(batch)
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds)) * 1e3
