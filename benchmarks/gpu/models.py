"""Loads the torch runner, and makes steps for it."""

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.gpu.parts import Setting, Skipped
from benchmarks.gpu.shapes import Shape, folder_of
from benchmarks.step_batches import step_batch
from sluice.engine.config import EngineConfig
from sluice.engine.runners.base import Runner

MOST_REQUESTS = 1024


def config_for(setting: Setting, folder: object, **fields: Any) -> EngineConfig:
    """Return the configuration of a runner on the device of this run, and of an executor that takes any batch."""
    num_threads = None if setting.device == "cuda" else 1
    fields = {"device": setting.device, "num_threads": num_threads, "max_queued_requests": MOST_REQUESTS, **fields}
    return EngineConfig(model_path=str(folder), **fields)


@contextmanager
def load_torch(config: EngineConfig) -> Iterator[Runner]:
    """Yield a runner of the checkpoint that the configuration names."""
    with _closing(_runner_module().load_runner(config)) as runner:
        yield runner


@contextmanager
def random_runner(
    setting: Setting, shape: Shape, limits: Mapping[str, int], *, graphs: bool = True
) -> Iterator[Runner]:
    """Yield a runner of the shape, whose random weights are made on the device."""
    module = _runner_module()
    from sluice.engine.runners.torch.weights import RandomWeights

    settings = {"graphs": "true" if graphs else "false"}
    config = config_for(setting, folder_of(shape, setting), dtype="bf16", runtime_settings=settings, **limits)
    weights = RandomWeights(has_own_head=not shape.config["tie_word_embeddings"])
    with _closing(module.load_with(config, weights)) as runner:
        yield runner


@contextmanager
def _closing(runner: Runner) -> Iterator[Runner]:
    """Close a runner at the end, and give its memory back to the device."""
    import torch

    try:
        yield runner
    finally:
        runner.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _runner_module() -> ModuleType:
    try:
        return import_module("sluice.engine.runners.torch.runner")
    except ImportError as error:
        raise Skipped(f"the torch runner cannot be imported: {error}") from error


def step_s(runner: Runner, past: list[int], new: list[int], repeats: int) -> float:
    """Return the median seconds of a step, from a batch on the host to its greedy tokens on the host."""
    batch = step_batch(past, new, runner.info.block_size, runner.info.num_blocks)
    rows = np.arange(len(new))
    times = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        runner.run(batch).argmax(rows)
        times.append(time.perf_counter() - began)
    return median(times[2:])
