"""What a model of arrays took of the machine's memory is given back, not only freed."""

import asyncio
from pathlib import Path

import numpy as np
import onnx
import psutil
from onnx import helper, numpy_helper

from pipelines.backends.arrays import heap
from tests.pipelines.backends.onnxruntime import parts

WIDTH = 256
NUM_LAYERS = 320
MODEL_MB = NUM_LAYERS * WIDTH * WIDTH * 4 / 1e6
PATIENCE_S = 30.0


def rss_mb() -> float:
    return float(psutil.Process().memory_info().rss / 1e6)


def layers() -> onnx.ModelProto:
    """Many weights, none of which is large enough to be memory of its own for the C library."""
    names = [f"h{layer}" for layer in range(NUM_LAYERS)]
    random = np.random.default_rng(0)
    weights = [numpy_helper.from_array(random.random((WIDTH, WIDTH), np.float32), f"w{name}") for name in names]
    nodes = [
        helper.make_node("MatMul", [before, f"w{name}"], [name])
        for before, name in zip(["x", *names], names, strict=False)
    ]
    return parts.graph(nodes, [parts.value("x", ["n", WIDTH])], [parts.value(names[-1], ["n", WIDTH])], weights)


async def test_an_unloaded_model_leaves_its_memory_to_the_system(tmp_path: Path) -> None:
    assert heap._trim is not None, "this test is about glibc"
    await (await parts.load(tmp_path, parts.one_op("Neg"))).unload()  # what the library keeps for good
    network = layers()
    onnx.save(network, parts.put(tmp_path, None).version_folder / "model.onnx")
    del network
    heap.give_back_freed_memory()
    before = rss_mb()
    model = await parts.load(tmp_path, None)
    assert rss_mb() - before < MODEL_MB * 1.5, "reading takes twice as much on top"
    await model.unload()
    async with asyncio.timeout(PATIENCE_S):
        while rss_mb() - before > MODEL_MB / 2:
            await asyncio.sleep(0.01)
