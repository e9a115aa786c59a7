"""Types, devices, limits and refusals of torch's runner."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sluice.engine.config import Task
from sluice.errors import ErrorCode
from tests.engine.runners.drive import prefill
from tests.engine.runners.family_goldens import NAMES, read_family
from tests.engine.runners.goldens import checkpoint_path
from tests.engine.runners.test_adapters import make_adapter
from tests.engine.runners.torch.loaded import config, load, load_family
from tests.errors import error_of
from tests.goldens.checkpoints import write_checkpoint

pytestmark = pytest.mark.torch
LLAMA = checkpoint_path("llama_tiny")


@pytest.mark.parametrize(
    ("fields", "code", "param", "words"),
    [
        ({"dtype": "int8"}, ErrorCode.INVALID, "dtype", "dtype must be auto, bf16, f32, float16, got 'int8'"),
        ({"kv_cache_dtype": "u8"}, ErrorCode.INVALID, "kv_cache_dtype", "must be auto or f32, as the computation is"),
        ({"kv_cache_dtype": "bf16"}, ErrorCode.INVALID, "kv_cache_dtype", "got 'bf16'"),
        ({"device": "tpu"}, ErrorCode.INVALID, "device", "device must be auto, cpu or cuda, got 'tpu'"),
        ({"quantization": "int8"}, ErrorCode.UNIMPLEMENTED, "quantization", "must be one of none, fp8 on torch, got"),
        ({"pipeline_parallel_size": 2}, ErrorCode.UNIMPLEMENTED, "pipeline_parallel_size", "divides every layer"),
        ({"num_threads": 0}, ErrorCode.INVALID, "num_threads", "num_threads must be at least 1, got 0"),
        ({"runtime_settings": {"graphs": "maybe"}}, ErrorCode.INVALID, "graphs", "graphs must be true or false"),
        ({"runtime_settings": {"graphz": "true"}}, ErrorCode.INVALID, "graphz", "did you mean graphs"),
        ({"num_blocks": 1 << 60}, ErrorCode.INVALID, "num_blocks", "cannot be allocated on cpu"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused(fields: dict[str, Any], code: ErrorCode, param: str, words: str) -> None:
    error = error_of(load, config(LLAMA, **fields))
    assert (error.code, error.param) == (code, param)
    assert words in error.message


def test_cuda_without_a_gpu_is_refused_with_what_torch_is() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    error = error_of(load, config(LLAMA, device="cuda"))
    assert (error.code, error.param) == (ErrorCode.UNAVAILABLE, "device")
    assert f"torch {torch.__version__}" in error.message and "finds no GPU; use cpu or auto" in error.message


def test_weights_that_were_built_in_int8_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(LLAMA, tmp_path / "built")
    (folder / "model.safetensors").rename(folder / "model-int8.safetensors")
    error = error_of(load, config(folder))
    assert (error.code, error.param) == (ErrorCode.UNIMPLEMENTED, "model_path")
    assert "are stored in int8, which is not supported on torch" in error.message


@pytest.mark.parametrize("dtype", ["bf16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_every_family_computes_in_short_types(name: str, dtype: str, tmp_path: Path) -> None:
    """The weights are random and wide, and experts that nearly tie change places."""
    runner, golden = load_family(name, tmp_path, dtype=dtype)
    assert (runner.info.dtype, runner.info.kv_cache_dtype) == (dtype, dtype)
    prompt, expected = golden.cases[-1].prompt_token_ids, np.array(golden.logits)
    found = prefill(runner, prompt, [len(prompt) // 2, len(prompt) - 1]).astype(np.float64)
    cosines = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() > (0.95 if dtype == "bf16" else 0.98)


def test_an_adapter_beyond_float16_is_refused_there(tmp_path: Path) -> None:
    """It would be infinite, and 0 times infinity reaches every token."""
    base = checkpoint_path("qwen3_tiny")
    adapter = make_adapter(base, tmp_path / "large", 1)
    file = adapter / "adapter_model.safetensors"
    save_file({name: each * np.float32(1e6) for name, each in load_file(file).items()}, file)
    runner = load(config(base, dtype="float16", enable_lora=True))
    error = error_of(runner.read_adapter, 1, "large", adapter)
    assert (error.code, error.param) == (ErrorCode.INVALID, "lora_modules")
    assert "must be finite in torch.float16, and are not" in error.message
    load(config(base, enable_lora=True)).read_adapter(1, "large", adapter)()


def test_hidden_states_are_the_rows_of_a_model_of_embeddings(tmp_path: Path) -> None:
    runner, golden = load_family("qwen2", tmp_path, task=Task.EMBED)
    rows = prefill(runner, golden.cases[-1].prompt_token_ids, [0, 3])
    hidden_size = golden.blueprint.config["hidden_size"]
    assert rows.shape == (2, hidden_size) == (2, runner.info.embedding_size)
    error = error_of(load, config(tmp_path, task=Task.EMBED, lora_modules={"a": "/a"}))
    assert (error.code, error.param) == (ErrorCode.UNIMPLEMENTED, "lora_modules")


def test_a_model_of_embeddings_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    write_checkpoint(read_family("qwen2").blueprint, tmp_path)
    file = tmp_path / "config.json"
    fields = {**msgspec.json.decode(file.read_bytes()), "is_causal": False}
    file.write_bytes(msgspec.json.encode(fields))
    error = error_of(load, config(tmp_path, task=Task.EMBED))
    assert "torch embeds with causal language models alone" in error.message


def test_random_weights_have_the_shape_of_a_folder_without_any(tmp_path: Path) -> None:
    """Benchmarks measure models of any size by these."""
    from sluice.engine.runners.torch.runner import load_with
    from sluice.engine.runners.torch.weights import RandomWeights

    shutil.copy(LLAMA / "config.json", tmp_path)
    first, same, other = (load_with(config(tmp_path), RandomWeights(seed)) for seed in (1, 1, 2))
    logits = [prefill(each, [5, 6, 7], [2]) for each in (first, same, other)]
    assert np.isfinite(logits[0]).all()
    np.testing.assert_array_equal(logits[0], logits[1])
    assert (logits[0] != logits[2]).any()


def test_the_identity_of_blocks_changes_with_their_bytes(tmp_path: Path) -> None:
    one = load(config(LLAMA))
    assert one.block_identity == load(config(LLAMA, num_blocks=8)).block_identity
    other, _ = load_family("gemma2", tmp_path)
    identities = {each.block_identity for each in (one, load(config(LLAMA, dtype="bf16")), other)}
    assert len(identities) == 3
