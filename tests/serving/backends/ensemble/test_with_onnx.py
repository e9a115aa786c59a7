"""Ensembles of real models."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from sluice.serving.backends.ensemble.backend import EnsembleModel
from sluice.serving.model import Model, infer_one
from tests.serving.backends.builders import Lookup
from tests.serving.backends.ensemble.parts import config_of, load, request
from tests.serving.backends.onnxruntime import parts as onnx_parts
from tests.waiting import PATIENCE_S

ADD_SUB_TWICE = """
    name: "twice" platform: "ensemble" max_batch_size: 8
    input { name: "A" data_type: TYPE_FP32 dims: [4] } input { name: "B" data_type: TYPE_FP32 dims: [4] }
    output { name: "TWICE_A" data_type: TYPE_FP32 dims: [4] } output { name: "TWICE_B" data_type: TYPE_FP32 dims: [4] }
    ensemble_scheduling {
      step {
        model_name: "m" model_version: -1
        input_map { key: "a" value: "A" } input_map { key: "b" value: "B" }
        output_map { key: "sum" value: "s" } output_map { key: "difference" value: "d" }
      }
      step {
        model_name: "m" model_version: -1
        input_map { key: "a" value: "s" } input_map { key: "b" value: "d" }
        output_map { key: "sum" value: "TWICE_A" } output_map { key: "difference" value: "TWICE_B" }
      }
    }
"""


@pytest.fixture
async def twice(tmp_path: Path) -> AsyncIterator[EnsembleModel]:
    add_sub: Model = await onnx_parts.load(tmp_path, onnx_parts.add_sub(), "max_batch_size: 8")
    yield await load(config_of(ADD_SUB_TWICE), Lookup(add_sub))
    await add_sub.close()


async def test_each_step_is_the_model(twice: EnsembleModel) -> None:
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal((3, 4)).astype(np.float32) for _ in range(2))
    async with asyncio.timeout(PATIENCE_S):
        response = await infer_one(twice, request({"A": a, "B": b}))
    sums, differences = a + b, a - b
    assert [each.name for each in response.outputs] == ["TWICE_B", "TWICE_A"]
    assert response.outputs[0].array.tobytes() == (sums - differences).tobytes()
    assert response.outputs[1].array.tobytes() == (sums + differences).tobytes()


async def test_a_failing_step_says_what_the_library_said(tmp_path: Path) -> None:
    node = helper.make_node("Reshape", ["x", "k"], ["y"])
    inputs = [onnx_parts.value("x", [4]), onnx_parts.value("k", [2], onnx_parts.INT64)]
    model = await onnx_parts.load(tmp_path, onnx_parts.graph([node], inputs, [onnx_parts.value("y", [None, None])]))
    text = """
        name: "e" platform: "ensemble" input { name: "x" data_type: TYPE_FP32 dims: [4] }
        input { name: "k" data_type: TYPE_INT64 dims: [2] } output { name: "y" data_type: TYPE_FP32 dims: [-1, -1] }
        ensemble_scheduling { step {
            model_name: "m" model_version: -1 input_map { key: "x" value: "x" } input_map { key: "k" value: "k" }
            output_map { key: "y" value: "y" }
        } }
    """
    ensemble = await load(config_of(text), Lookup(model))
    four = np.arange(4, dtype=np.float32)
    async with asyncio.timeout(PATIENCE_S):
        response = await infer_one(ensemble, request({"x": four, "k": np.array([2, 2])}))
        assert response.outputs[0].array.tolist() == [[0, 1], [2, 3]]
        with pytest.raises(Exception, match=r"^in ensemble 'e', onnx runtime error \d: .*Reshape"):
            await infer_one(ensemble, request({"x": four, "k": np.array([3, 3])}))
    await model.close()
