"""The answer to a sequence depends on nothing else: not on what lies in the cache's memory, not on the sequences beside
it, not on the steps before."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from sluice.engine.arrays import FloatArray
from sluice.engine.config import EngineConfig
from sluice.engine.runners.base import Runner
from tests.engine.runners.drive import poison, uniform_batch
from tests.engine.runners.family_goldens import FamilyGolden, read_family
from tests.engine.runners.goldens import CHECKPOINTS, checkpoint_path
from tests.goldens.checkpoints import Blueprint, write_checkpoint
from tests.under_test import load_runner

MIXTURES = ("qwen3_moe", "deepseek_v3")
"""Mixtures of experts."""


def load(blueprint: Blueprint, directory: Path, **fields: Any) -> Runner:
    """One thread: several cost more than these small models give them to do."""
    write_checkpoint(blueprint, directory)
    return load_runner(EngineConfig(**{"model_path": str(directory), "num_blocks": 60, "num_threads": 1, **fields}))


@pytest.mark.parametrize("dtype", ["f32", "auto"])
@pytest.mark.parametrize("name", ["gemma2_softcap", "gemma3", "lfm2", "mistral", "llama_sharded", *MIXTURES])
def test_a_sequence_of_nan_harms_no_other(name: str, dtype: str, tmp_path: Path) -> None:
    """The first sequence of a batch has NaN in its past. In a mixture of experts it also leaves their batches, and rows
    of a product of another size may differ in their last bits."""
    runner = load(read_family(name).blueprint, tmp_path, dtype=dtype)
    batch = uniform_batch(num_seqs=6, num_new=5, num_past=40)
    clean = runner.run(batch).read().copy()
    poison(runner, [0, 1])
    spoilt = runner.run(batch).read().copy()
    assert np.isnan(spoilt[0]).any()
    last_bits = {"f32": 1e-4, "auto": 0.05}[dtype] if name in MIXTURES else 0.0
    np.testing.assert_allclose(spoilt[1:], clean[1:], rtol=0.0, atol=last_bits)
    runner.close()


def with_large_heads(golden: FamilyGolden) -> Blueprint:
    """Return a checkpoint whose queries, keys and values take more memory than an allocator keeps for the next use."""
    size, blueprint = 64, golden.blueprint
    rows = {"q_proj": 4 * size, "k_proj": 2 * size, "v_proj": 2 * size}
    tensors = {}
    for name, shape in blueprint.tensors.items():
        part = name.split(".")[-2]
        tensors[name] = (rows[part], shape[1]) if part in rows else shape
        if part == "o_proj":
            tensors[name] = (shape[0], 4 * size)
    config = {**blueprint.config, "head_dim": size, "max_position_embeddings": 1024}
    return replace(blueprint, config=config, tensors=tensors)


@pytest.mark.parametrize("dtype", ["f32", "auto"])
@pytest.mark.parametrize("name", ["gemma2_softcap", "gemma2"])
def test_a_step_larger_than_all_before_is_computed_right(name: str, dtype: str, tmp_path: Path) -> None:
    """A step has the same logits when it is run again, now that every buffer has its size."""
    runner = load(with_large_heads(read_family(name)), tmp_path, dtype=dtype, num_blocks=600)
    for shape in ((1, 512, 0), (4, 128, 0), (8, 64, 128), (16, 32, 400), (16, 16, 900)):
        batch = uniform_batch(*shape)
        first: FloatArray = runner.run(batch).read().copy()
        assert np.isfinite(first).all()
        np.testing.assert_array_equal(first, runner.run(batch).read())
    runner.close()


@pytest.mark.openvino
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_in_f32_a_token_has_the_same_logits_alone_and_in_any_batch(
    name: str, quantization: str, tmp_path: Path
) -> None:
    """To the last bit, with compressed weights too."""
    config = EngineConfig(
        model_path=str(checkpoint_path(name)),
        dtype="f32",
        quantization=quantization,
        cache_path=str(tmp_path),
        num_blocks=160,
        num_threads=1,
    )
    runner = load_runner(config)
    alone = runner.run(uniform_batch(num_seqs=1, num_new=1, num_past=40)).read().copy()
    for num_seqs in (2, 3, 7, 16, 33, 64):
        together = runner.run(uniform_batch(num_seqs, num_new=1, num_past=40)).read()
        np.testing.assert_array_equal(together[0], alone[0])
    runner.close()
