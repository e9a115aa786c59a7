"""Blocks of the cache that are copied out and back in: the same bits, so the same tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.bundled import BUNDLED_MODEL, models_folder
from sluice.engine.config import EngineConfig
from sluice.engine.kv_tiers.identity import block_identity, portable_identity
from tests.engine.runners.conftest import EditableCheckpoint
from tests.engine.runners.goldens import checkpoint_path
from tests.engine.runners.test_adapters import make_adapter
from tests.engine.scripted_executor import ScriptedExecutor
from tests.under_test import load_runner

BUNDLED = models_folder() / BUNDLED_MODEL / "1"
PROMPTS = [[(7 * position + 31 * kind) % 180 + 3 for position in range(100 + 30 * kind)] for kind in range(4)]
VISITS = (0, 1, 2, 3, 0, 2, 1, 0, 3)
"""Prompts in the order in which they come: each when the cache has given up its blocks."""


def serve(path: Path, tiers: dict[str, Any], sampling: dict[str, Any], **fields: Any) -> tuple[list[Any], int]:
    """Return the tokens of each visit, and how many tokens came back from the tiers."""
    config: dict[str, Any] = {"model_path": str(path), "num_blocks": 8, "max_model_len": 256, **fields}
    runner = load_runner(EngineConfig(**config))
    bench = ScriptedExecutor(runner, **config, **tiers)  # type: ignore[arg-type]
    for stream_id, kind in enumerate(VISITS):
        bench.submit(stream_id, PROMPTS[kind], max_tokens=8, ignore_eos=True, **sampling)
        bench.finish()
    assert not bench.failures
    stats = bench.executor.stats().kv_tiers
    runner.close()
    return [bench.tokens[stream_id] for stream_id in range(len(VISITS))], stats.restored_tokens_total if stats else 0


@pytest.mark.parametrize("kv_cache_dtype", ["f32", pytest.param("u8", marks=pytest.mark.openvino)])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5}, {"cache_salt": "tenant"}])
@pytest.mark.parametrize("name", ["llama_tiny", "qwen3_tiny"])
def test_tokens_are_the_same_with_and_without_tiers(name: str, sampling: dict[str, Any], kv_cache_dtype: str) -> None:
    fields = {"dtype": "f32", "kv_cache_dtype": kv_cache_dtype}
    without, _ = serve(checkpoint_path(name), {}, sampling, **fields)
    with_tiers, num_restored = serve(checkpoint_path(name), {"kv_host_cache_bytes": 8 << 20}, sampling, **fields)
    assert with_tiers == without
    assert num_restored > 0


def test_the_bundled_model_gives_the_same_tokens() -> None:
    without, _ = serve(BUNDLED, {}, {}, dtype="f32")
    with_tiers, num_restored = serve(BUNDLED, {"kv_host_cache_bytes": 64 << 20}, {}, dtype="f32")
    assert with_tiers == without
    assert num_restored > 0


def test_adapters_have_blocks_of_their_own(float_checkpoint: EditableCheckpoint, tmp_path: Path) -> None:
    folder = make_adapter(float_checkpoint.path, tmp_path / "adapter", 1)
    fields = {"dtype": "f32", "lora_modules": {"one": str(folder)}}
    tiers = {"kv_host_cache_bytes": 8 << 20}
    plain, _ = serve(float_checkpoint.path, tiers, {}, **fields)
    without, _ = serve(float_checkpoint.path, {}, {"adapter": "one"}, **fields)
    with_tiers, num_restored = serve(float_checkpoint.path, tiers, {"adapter": "one"}, **fields)
    assert with_tiers == without != plain
    assert num_restored > 0


@pytest.mark.parametrize("kv_cache_dtype", ["f32", pytest.param("u8", marks=pytest.mark.openvino)])
def test_a_block_has_all_of_its_bytes_in_any_place(kv_cache_dtype: str) -> None:
    config = EngineConfig(
        model_path=str(checkpoint_path("llama_tiny")), dtype="f32", num_blocks=4, kv_cache_dtype=kv_cache_dtype
    )
    runner = load_runner(config)
    generator = np.random.default_rng(0)
    written = [generator.integers(0, 256, runner.block_bytes).astype(np.uint8) for _ in range(4)]
    runner.write_blocks([2, 0, 3, 1], written)
    found = [np.zeros(runner.block_bytes, np.uint8) for _ in range(4)]
    runner.read_blocks([1, 2, 3, 0], found)
    assert all(np.array_equal(found[to], written[each]) for to, each in enumerate((3, 0, 2, 1)))
    runner.close()


@pytest.mark.openvino
def test_the_identity_changes_with_what_blocks_depend_on(float_checkpoint: EditableCheckpoint) -> None:
    def identity(**fields: Any) -> tuple[str, str]:
        config = EngineConfig(**{"model_path": str(float_checkpoint.path), "dtype": "f32", "num_blocks": 4, **fields})
        runner = load_runner(config)
        try:
            return block_identity(config.model_path, runner), portable_identity(config.model_path, runner)
        finally:
            runner.close()

    first = identity()
    assert identity(num_blocks=8) == first
    others = [identity(kv_cache_dtype="u8"), identity(max_model_len=64), identity(quantization="int8")]
    weights = float_checkpoint.path / "model.safetensors"
    weights.touch()
    copied = identity()
    assert len({each[0] for each in (first, *others, copied)}) == 5
    assert copied[1] == first[1], "a copy of the files computes the same"
    assert len({each[1] for each in (first, *others)}) == 4
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert identity()[1] != first[1]
