"""The memory of the gateway and of the engine over many requests, which must not grow with their number."""

from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from benchmarks.figures import BenchmarkError, Figure, ReportProgress
from benchmarks.server import Server, running_server
from benchmarks.streaming.client import Client, chat_request
from benchmarks.streaming.streams import cores
from sluice.gateway.checkpoint import find_checkpoint, model_name

NUM_REQUESTS = 20_000
STREAMS, TOKENS = 32, 4
NUM_PARTS = 20
"""Parts of the run, after each of which memory is read."""
NUM_WARM = 8
"""Parts before the growth counts: kernels, pools and the allocator's arenas reach their size."""
MB_A_REQUEST = 1.0 / 100_000
NOISE_MB = 2.0
"""Growth of this size is noise: with few requests, it is more than what is allowed for each."""
OPTIONS = ("--num-blocks", "512")
"""A KV cache that the first requests use up: its pages come into memory when they are first written."""


def measure(num_requests: int, folder: Path, report: ReportProgress) -> list[Figure]:
    """Send short streams to the bundled model, and measure both processes' growth after the first of them.

    Raises BenchmarkError where a process grows more than is allowed.
    """
    checkpoint = find_checkpoint(None)
    client = Client.build(folder, cores()[1])
    request = chat_request(model_name(checkpoint), TOKENS, temperature=0.0)
    part = max(num_requests // NUM_PARTS, STREAMS)
    sizes = []
    with running_server(checkpoint, folder / "flat-memory.log", *OPTIONS) as server:
        port = urlsplit(server.url).port
        assert port is not None
        for number in range(1, NUM_PARTS + 1):
            client.run(port, request, streams=STREAMS, requests=part, tokens=TOKENS)
            sizes.append(_sizes_mb(server))
            gateway_mb, engine_mb = sizes[-1]
            report(f"{number * part:,} requests: gateway {gateway_mb:.1f} MB, engine {engine_mb:.1f} MB")
    growths = _growths_mb(np.array(sizes[NUM_WARM:]))
    num_counted = part * (NUM_PARTS - NUM_WARM)
    figures = []
    for name, growth_mb, size_mb in zip(("gateway", "engine"), growths, sizes[-1], strict=True):
        if growth_mb > NOISE_MB + MB_A_REQUEST * num_counted:
            raise BenchmarkError(f"the {name} grew by {growth_mb:.1f} MB over {num_counted:,} requests")
        figures.append(Figure("growth a 1,000 requests", name, "kB", (growth_mb * 1e6 / num_counted,)))
        figures.append(Figure(f"memory after {part * NUM_PARTS:,} requests", name, "MB", (size_mb,)))
    return figures


def _sizes_mb(server: Server) -> tuple[float, float]:
    """Return the resident memory of the gateway and of all its children, in MB of 10^6 bytes."""
    gateway, *children = (process.memory_info().rss / 1e6 for process in server.processes())
    return gateway, sum(children)


def _growths_mb(sizes: "np.ndarray[tuple[int, int], np.dtype[np.float64]]") -> list[float]:
    """Return the growth of each column from the first row to the last, by the line that fits all rows best."""
    slopes, _ = np.polyfit(np.arange(len(sizes)), sizes, 1)
    return [float(slope) * (len(sizes) - 1) for slope in slopes]
