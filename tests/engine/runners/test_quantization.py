"""Compressed weights and a compressed KV cache: accuracy, files, memory, and rejected options."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from safetensors.numpy import load_file, save_file

from sluice.engine.arrays import FloatArray
from sluice.engine.config import EngineConfig
from sluice.engine.runners.base import Runner, StepBatch
from sluice.engine.runners.openvino.runner import OpenVinoRunner, load_runner
from sluice.engine.runners.openvino.weights.compression import GROUP, quantize_groups, quantize_rows
from sluice.errors import ErrorCode, SluiceError
from tests import paths
from tests.engine.runners.conftest import EditableCheckpoint
from tests.engine.runners.goldens import checkpoint_path
from tests.errors import error_of

RILL = paths.MODELS / "rill" / "1"
PROMPT = np.random.default_rng(0).integers(3, 192, 90).tolist()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def load(path: Path, cache: Path, **fields: Any) -> OpenVinoRunner:
    limits: dict[str, Any] = {"dtype": "f32", "num_blocks": 8, "cache_path": str(cache), **fields}
    return load_runner(EngineConfig(model_path=str(path), **limits))


def refusal(path: Path, cache: Path, **fields: Any) -> SluiceError:
    return error_of(load, path, cache, **fields)


def logits_of(runner: Runner, chunk: int = 512) -> FloatArray:
    """Return the logits of each token of PROMPT, which is run in chunks from block 0 on."""
    rows = []
    for start in range(0, len(PROMPT), chunk):
        token_ids = PROMPT[start : start + chunk]
        num_tokens, stop = len(token_ids), start + len(token_ids)
        num_blocks = -(-stop // runner.info.block_size)
        batch = StepBatch(
            token_ids=np.array(token_ids, np.int32),
            position_ids=np.arange(start, stop, dtype=np.int32),
            past_lens=np.array([start], np.int32),
            subsequence_begins=np.array([0, num_tokens], np.int32),
            block_indices=np.arange(num_blocks, dtype=np.int32),
            block_indices_begins=np.array([0, num_blocks], np.int32),
            sampled_rows=np.arange(num_tokens, dtype=np.int32),
            max_context_len=stop,
        )
        rows.append(runner.run(batch).read().copy())
    return np.concatenate(rows)


def agreement(actual: FloatArray, expected: FloatArray) -> float:
    """Return the mean cosine similarity of the rows."""
    products = (actual * expected).sum(1)
    return float((products / np.linalg.norm(actual, axis=1) / np.linalg.norm(expected, axis=1)).mean())


def test_rows_in_int8() -> None:
    weights = np.random.default_rng(0).normal(size=(6, 100)).astype(np.float32)
    weights[2], weights[3] = 0, -1.5
    codes, scales = quantize_rows(weights.copy())
    assert np.abs(codes).max() == 127
    assert np.all(np.abs(codes * scales - weights) <= scales / 2 + 1e-7)
    assert not (codes * scales)[2].any()


def test_groups_in_int4() -> None:
    weights = np.random.default_rng(0).normal(size=(6, 2 * GROUP)).astype(np.float32)
    weights[1], weights[2], weights[3] = 0, -1.5, 2
    packed, scales, zeros = quantize_groups(weights.copy())
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(6, 2, GROUP)
    restored = ((codes - zeros.astype(np.float32)) * scales).reshape(weights.shape)
    assert np.all(np.abs(restored - weights) <= np.repeat(scales[:, :, 0], GROUP, 1) * 1.001)
    np.testing.assert_allclose(restored[1:4], weights[1:4], rtol=1e-6)


def test_compressed_weights_agree(cache: Path) -> None:
    """On the bundled model. `benchmarks.agreement` measures the difference."""
    exact = logits_of(load(RILL, cache))
    for quantization, least in (("int8", 0.999), ("int4", 0.97)):
        runner = load(RILL, cache, quantization=quantization)
        assert runner.info.quantization == quantization
        assert least < agreement(logits_of(runner), exact) < 1 - 1e-7


def test_weights_in_float16_are_compressed_too(float_checkpoint: EditableCheckpoint, cache: Path) -> None:
    file = float_checkpoint.path / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor.astype(np.float16) for name, tensor in tensors.items()}, file)
    expected = logits_of(load(float_checkpoint.path, cache))
    # The weights are random and wide: int4 is further off here than in any model that was trained.
    for quantization, least in (("int8", 0.995), ("int4", 0.9)):
        runner = load(float_checkpoint.path, cache, quantization=quantization)
        assert least < agreement(logits_of(runner), expected) < 1 - 1e-7


@pytest.mark.parametrize(("quantization", "kinds"), [("int8", {"i8"}), ("int4", {"i8", "u4"})])
def test_the_runtime_keeps_matrices_compressed(cache: Path, quantization: str, kinds: set[str]) -> None:
    runner = load(checkpoint_path("llama_tiny"), cache, quantization=quantization)
    assert set(_matrix_types(runner)) == kinds


def _matrix_types(runner: OpenVinoRunner) -> Counter[str]:
    """Return the types of the weights of the compiled graph's matrix products."""
    graph: ov.Model = runner._session._requests[0].get_compiled_model().get_runtime_model()
    products = [node for node in graph.get_ops() if _said(node, "layerType") == "FullyConnected"]
    assert products
    return Counter(_said(node.input_value(1).get_node(), "outputPrecisions") for node in products)


def _said(node: ov.Node, key: str) -> str:
    text: str = node.get_rt_info()[key].astype(str)
    return text


def test_rows_of_zeros_give_numbers(float_checkpoint: EditableCheckpoint, cache: Path) -> None:
    file = float_checkpoint.path / "model.safetensors"
    tensors = load_file(file)
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight"):
        tensors[name][5:9] = 0
    save_file(tensors, file)
    for quantization in ("int8", "int4"):
        assert np.isfinite(logits_of(load(float_checkpoint.path, cache, quantization=quantization))).all()


def test_compressed_once(checkpoint: EditableCheckpoint, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    def made() -> int:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            load(checkpoint.path, cache, quantization="int8")
        return sum("compressed weights to int8" in message for message in caplog.messages)

    assert made() == 1
    assert made() == 0
    file = checkpoint.path / "model.safetensors"
    file.write_bytes(file.read_bytes())  # the same content, but who knows that without reading it all
    assert made() == 1
    assert {path.suffix for path in (cache / "compressed").iterdir()} == {".safetensors"}


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = refusal(checkpoint_path("llama_tiny"), tmp_path / "file", quantization="int4")
    assert (error.code, error.param) == (ErrorCode.UNAVAILABLE, "cache_path")
    assert "set cache_path to a folder with room" in error.message


def test_unknown_kinds(cache: Path) -> None:
    error = refusal(checkpoint_path("llama_tiny"), cache, quantization="int2")
    assert error.message == "quantization must be one of none, int8, int4, got 'int2'"
    error = refusal(checkpoint_path("llama_tiny"), cache, kv_cache_dtype="u4")
    assert error.message == "kv_cache_dtype must be one of auto, bf16, f32, u8, got 'u4'"
    error = refusal(checkpoint_path("llama_tiny"), cache, kv_cache_dtype="bf16")
    assert error.message.startswith("kv_cache_dtype must be f32, as the computation is, or u8, got bf16")


def test_a_cache_in_u8_agrees_and_is_smaller(cache: Path) -> None:
    path = checkpoint_path("llama_tiny")
    exact = load(path, cache)
    expected = logits_of(exact)
    small = load(path, cache, kv_cache_dtype="u8", num_blocks=None, kv_cache_memory_bytes=1 << 20)
    large = load(path, cache, num_blocks=None, kv_cache_memory_bytes=1 << 20)
    assert (small.info.kv_cache_dtype, large.info.kv_cache_dtype) == ("u8", "f32")
    assert small.info.num_blocks > 2 * large.info.num_blocks  # heads of 16 are small beside their scales
    whole, chunked = logits_of(small), logits_of(small, chunk=7)
    assert agreement(whole, expected) > 0.999
    assert agreement(chunked, expected) > 0.999
    np.testing.assert_array_equal(logits_of(small), whole)  # blocks that were used before make no difference
