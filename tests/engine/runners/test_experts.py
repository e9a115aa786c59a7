"""Mixtures of experts: the kernel that computes the chosen ones alone, and the forms of their stored weights."""

import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from safetensors.numpy import load_file, save_file

from sluice.engine.arrays import FloatArray
from sluice.engine.config import EngineConfig
from sluice.engine.runners.openvino import source
from sluice.engine.runners.openvino.graph import experts
from sluice.engine.runners.openvino.runner import OpenVinoRunner, load_runner
from sluice.engine.runners.openvino.source import check_folder
from sluice.errors import ErrorCode
from tests.engine.runners.drive import Driver, Prompt, poison, prefill, uniform_batch
from tests.engine.runners.family_goldens import NAMES, FamilyGolden, read_family
from tests.engine.runners.test_types_and_batches import least_cosine
from tests.errors import error_of
from tests.goldens.checkpoints import write_checkpoint

IS_EXPERT = re.compile(r"\.experts\.|block_sparse_moe\.input_linear")
SPARSE = [name for name in NAMES if any(IS_EXPERT.search(tensor) for tensor in read_family(name).blueprint.tensors)]
GOLDEN = "qwen3_moe_some_layers"
"""A model with experts in one layer of four, stored in float32."""
BLOCK = "model.layers.1.mlp.experts"


def load(path: Path, **fields: Any) -> OpenVinoRunner:
    return load_runner(
        EngineConfig(
            **{"model_path": str(path), "dtype": "f32", "num_blocks": 20, "cache_path": str(path / "cache"), **fields}
        )
    )


def logits_of(runner: OpenVinoRunner, golden: FamilyGolden) -> FloatArray:
    prompt = golden.cases[-1].prompt_token_ids
    return prefill(runner, prompt, sampled_rows=[len(prompt) // 2, len(prompt) - 1]).copy()


def kernels(runner: OpenVinoRunner) -> Counter[str]:
    """Return the kernels of the compiled graph, `GatherMatmul` with the type of its weights."""
    graph: ov.Model = runner._session._requests[0].get_compiled_model().get_runtime_model()
    return Counter(_kernel(node) for node in graph.get_ops())


def _kernel(node: ov.Node) -> str:
    name: str = node.get_rt_info()["layerType"].astype(str)
    if name != "GatherMatmul":
        return name
    weights = node.input_value(1).get_node()
    return f"{name} {weights.get_rt_info()['outputPrecisions'].astype(str)}"


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the few experts of the goldens for many."""
    monkeypatch.setattr(experts, "FEW_EXPERTS", 0)
    monkeypatch.setattr(source, "FEW_EXPERTS", 0)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(
    "name", [each if each == GOLDEN else pytest.param(each, marks=pytest.mark.long) for each in SPARSE]
)
def test_many_experts_are_gathered(name: str, tmp_path: Path) -> None:
    """The plugin has recognized the graph: no product is of all experts. The goldens' few experts are computed one by
    one elsewhere, with the same logits and tokens."""
    golden = read_family(name)
    write_checkpoint(golden.blueprint, tmp_path)
    runner = load(tmp_path, num_blocks=40, max_model_len=golden.max_model_len)
    layers = {tensor.split(".")[2] for tensor in golden.blueprint.tensors if IS_EXPERT.search(tensor)}
    assert kernels(runner)["GatherMatmul f32"] == (2 if name == "gpt_oss" else 3) * len(layers)
    expected = np.array(golden.logits, np.float32)
    assert np.abs(logits_of(runner, golden) - expected).max() < 3e-5 * np.abs(expected).max()
    prompts = [Prompt(case.prompt_token_ids, case.max_tokens, first_step=2 * i) for i, case in enumerate(golden.cases)]
    generated = Driver(runner, chunk_sizes=(7, 30, 50), seed=4).generate(prompts)
    assert generated == [case.token_ids for case in golden.cases]
    runner.close()


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("dtype", ["f32", "auto"])
def test_a_sequence_of_nan_harms_no_other_among_many_experts(dtype: str, tmp_path: Path) -> None:
    write_checkpoint(read_family(GOLDEN).blueprint, tmp_path)
    runner, batch = load(tmp_path, dtype=dtype, num_blocks=60), uniform_batch(num_seqs=6, num_new=5, num_past=40)
    clean = runner.run(batch).read().copy()
    poison(runner, [0, 1])
    spoilt = runner.run(batch).read().copy()
    assert np.isnan(spoilt[0]).any()
    np.testing.assert_array_equal(spoilt[1:], clean[1:])
    runner.close()


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_many_experts_stay_compressed(quantization: str, tmp_path: Path) -> None:
    """Matrices of 64 columns are in groups of int4."""
    write_checkpoint(read_family(GOLDEN).blueprint, tmp_path)
    widen(tmp_path)
    runner = load(tmp_path, quantization=quantization)
    expected = {"int8": {"GatherMatmul i8": 3}, "int4": {"GatherMatmul i8": 2, "GatherMatmul u4": 1}}[quantization]
    assert {kernel: count for kernel, count in kernels(runner).items() if "GatherMatmul" in kernel} == expected
    runner.close()


@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.998), ("int4", 0.97)])
def test_both_forms_agree_when_compressed(
    quantization: str, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = read_family(GOLDEN)
    write_checkpoint(golden.blueprint, tmp_path)
    widen(tmp_path)
    exact, few = logits_of(load(tmp_path), golden), logits_of(load(tmp_path, quantization=quantization), golden)
    monkeypatch.setattr(experts, "FEW_EXPERTS", 0)
    many = logits_of(load(tmp_path, quantization=quantization), golden)
    assert least < least_cosine(few, exact) < 1 - 1e-7
    assert least_cosine(few, many) > 0.999  # activations are rounded for the products of one, not of the other


def widen(path: Path) -> None:
    """Give the experts 64 features between their matrices."""
    tensors = load_file(path / "model.safetensors")
    random = np.random.default_rng(0)
    for name in [name for name in tensors if BLOCK in name]:
        rows, columns = tensors[name].shape
        shape = (rows, 64) if "down" in name else (64, columns)
        tensors[name] = random.standard_normal(shape).astype(np.float32) / 8
    save_file(tensors, path / "model.safetensors")
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace('"moe_intermediate_size": 32', '"moe_intermediate_size": 64'))


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_experts_in_one_tensor_are_the_same(quantization: str, tmp_path: Path) -> None:
    """As transformers has them in memory."""
    golden = read_family(GOLDEN)
    write_checkpoint(golden.blueprint, tmp_path / "single")
    write_checkpoint(golden.blueprint, tmp_path / "joined")
    join(tmp_path / "joined")
    single, joined = (load(tmp_path / each, quantization=quantization) for each in ("single", "joined"))
    np.testing.assert_array_equal(logits_of(single, golden), logits_of(joined, golden))


def join(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    singles = {name: tensors.pop(name) for name in list(tensors) if BLOCK in name}
    parts = {
        part: np.stack([singles[f"{BLOCK}.{expert}.{part}_proj.weight"] for expert in range(4)])
        for part in ("gate", "up", "down")
    }
    tensors[f"{BLOCK}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], 1)
    tensors[f"{BLOCK}.down_proj"] = parts["down"]
    save_file(tensors, path / "model.safetensors")


@pytest.mark.usefixtures("many")
def test_assembled_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(read_family(GOLDEN).blueprint, tmp_path)
    for expected in (1, 0):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            load(tmp_path).close()
        assert sum("assembled weights" in message for message in caplog.messages) == expected
    assert len(list((tmp_path / "cache" / "assembled").iterdir())) == 1


def test_matrices_of_few_experts_stay_where_they_are(tmp_path: Path) -> None:
    write_checkpoint(read_family(GOLDEN).blueprint, tmp_path)
    load(tmp_path).close()
    assert not (tmp_path / "cache").exists()


def test_a_check_writes_nothing(tmp_path: Path) -> None:
    write_checkpoint(read_family(GOLDEN).blueprint, tmp_path)
    check_folder(tmp_path)
    assert not (tmp_path / "cache").exists()


def test_an_expert_that_is_missing_or_unlike_others(tmp_path: Path) -> None:
    write_checkpoint(read_family(GOLDEN).blueprint, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = f"{BLOCK}.2.up_proj.weight"
    save_file({**tensors, name: tensors[name][1:].copy()}, file)
    error = error_of(load, tmp_path)
    assert (error.code, error.param) == (ErrorCode.INVALID, "model_path")
    assert f"tensor {name!r} is F32 of shape (31, 48), but '{BLOCK}.0.up_proj.weight' is F32" in error.message
    del tensors[name]
    save_file(tensors, file)
    error = error_of(load, tmp_path)
    assert f"expert 2 lacks a tensor for '{BLOCK}.up_proj.weight', which 3 others have" in error.message


def test_routers_are_not_compressed(tmp_path: Path) -> None:
    for name in SPARSE:
        write_checkpoint(read_family(name).blueprint, tmp_path / name)
        weights = source.open_weights(tmp_path / name, "int8", tmp_path / "cache")
        routers = [tensor for tensor in weights.tensors if re.search(r"(gate|router(\.layer)?)\.weight$", tensor)]
        assert routers
        assert not [tensor for tensor in routers if tensor in weights._compressed]
