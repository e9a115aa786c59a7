"""Unloading a model returns its memory to the system."""

import asyncio
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import onnx
import psutil
from onnx import helper, numpy_helper

from sluice import heap
from tests.serving.backends.onnxruntime import parts
from tests.waiting import PATIENCE_S, until

WIDTH = 256
NUM_LAYERS = 320
MODEL_MB = NUM_LAYERS * WIDTH * WIDTH * 4 / 1e6


def rss_mb() -> float:
    return float(psutil.Process().memory_info().rss / 1e6)


def layers() -> onnx.ModelProto:
    """Make many weights that are each too small for the C library to map separately."""
    names = [f"h{layer}" for layer in range(NUM_LAYERS)]
    random = np.random.default_rng(0)
    weights = [numpy_helper.from_array(random.random((WIDTH, WIDTH), np.float32), f"w{name}") for name in names]
    nodes = [
        helper.make_node("MatMul", [before, f"w{name}"], [name])
        for before, name in zip(["x", *names], names, strict=False)
    ]
    return parts.graph(nodes, [parts.value("x", ["n", WIDTH])], [parts.value(names[-1], ["n", WIDTH])], weights)


def test_an_unloaded_model_leaves_its_memory_to_the_system(tmp_path: Path) -> None:
    """Runs in a process of its own, because other tests allocate and free memory in this one."""
    assert heap._trim is not None, "this test is about glibc"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        loaded_mb, left_mb = alone.submit(measured, tmp_path).result(2 * PATIENCE_S)
    assert loaded_mb < MODEL_MB * 1.5, "reading takes twice as much on top"
    assert left_mb < MODEL_MB / 2


def measured(folder: Path) -> tuple[float, float]:
    """Return the MB that the process has grown by with the model loaded, and after it was unloaded."""
    return asyncio.run(_measured(folder))


async def _measured(folder: Path) -> tuple[float, float]:
    await (await parts.load(folder, parts.one_op("Neg"))).unload()  # what the library keeps for good
    network = layers()
    onnx.save(network, parts.put(folder, None).version_folder / "model.onnx")
    del network
    heap.trim_heap()
    before = rss_mb()
    model = await parts.load(folder, None)
    loaded_mb = rss_mb() - before
    await model.unload()
    with suppress(TimeoutError):
        await until(lambda: rss_mb() - before <= MODEL_MB / 2)
    return loaded_mb, rss_mb() - before
