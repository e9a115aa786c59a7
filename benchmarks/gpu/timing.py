"""Times of what a device does, on a GPU by its own clock."""

import statistics
import time
from collections.abc import Callable

import torch


def median_s(function: Callable[[], object], device: str, repeats: int = 20) -> float:
    """Return the median seconds of a call, after a few."""
    for _ in range(3):
        function()
    measure = _on_gpu if device == "cuda" else _on_cpu
    return statistics.median(measure(function) for _ in range(repeats))


def _on_gpu(function: Callable[[], object]) -> float:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    function()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def _on_cpu(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def graphed(function: Callable[[], object], device: str) -> Callable[[], object]:
    """Return what replays the launches of a function, on the CPU the function itself."""
    if device != "cuda":
        return function
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    replay: Callable[[], object] = graph.replay
    return replay
