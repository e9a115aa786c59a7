"""The metrics page of a server on a simulated machine with GPUs and TensorRT-LLM.

The product's own code makes the metrics of GPUs and TensorRT-LLM, from facts as NVML and TensorRT-LLM give them. All
other metrics come from the server.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from types import SimpleNamespace
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sluice.engine.statistics import EngineStats, IterationStats
from sluice.engine.types import EngineInfo
from sluice.gateway.telemetry.machine import GpuProcess, GpuSample, gpu_families, process_memory
from sluice.gateway.telemetry.trt_llm import TrtLlmCollector
from sluice.pipelines.llm.activity import TextActivity
from tests.pipelines.llm.doubles import language_model

_GIB = 1 << 30
_ENGINE_PID = 4711


class _Gpus(Collector):
    """Collects two GPUs that an engine uses. Their energy grows with each scrape."""

    def __init__(self) -> None:
        self._scrapes = count(1)

    def collect(self) -> Iterator[Metric]:
        joules = 600.0 * next(self._scrapes)
        samples = [_sample(index, joules) for index in range(2)]
        yield from gpu_families(samples)
        yield from process_memory([(gpu.uuid, gpu.processes) for gpu in samples], {_ENGINE_PID: "rill"})


def _sample(index: int, joules: float) -> GpuSample:
    return GpuSample(
        f"GPU-{index}",
        utilization=0.8,
        memory_total_bytes=80 * _GIB,
        memory_used_bytes=70 * _GIB,
        power_usage_watts=600.0,
        power_limit_watts=700.0,
        energy_joules=joules,
        index=index,
        name="NVIDIA H100 80GB HBM3",
        driver_version="580.95.05",
        processes=(GpuProcess((_ENGINE_PID, 1), 68 * _GIB),),
    )


def _on_tensorrt_llm() -> Any:
    """Return a model whose engine reports TensorRT-LLM's statistics, with the attributes that the page reads."""
    iteration = IterationStats(
        iteration=9000, latency_ms=11.5, gpu_memory_bytes=68 * _GIB, cpu_memory_bytes=_GIB, pinned_memory_bytes=_GIB
    )
    engine = SimpleNamespace(stats=EngineStats(8, 2, 600, 400, 900, 9000, 90.0, 9.0, 5000, 70_000, iteration=iteration))
    engine.heartbeat_age_s = lambda: 0.01
    info = EngineInfo(
        runtime="tensorrt_llm",
        model_type="llama",
        dtype="bf16",
        vocab_size=128_256,
        eos_token_ids=(128_001,),
        max_model_len=8192,
        block_size=32,
        num_blocks=1000,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        load_seconds=60.0,
    )
    text = SimpleNamespace(engine=engine, info=info, activity=TextActivity())
    model: Any = language_model(text, "llama")
    model.config = SimpleNamespace(metric_tags={})
    model.statistics = None
    return model


@contextmanager
def page_with_gpus(metrics_url: str) -> Iterator[str]:
    """Serve the page and yield its `host:port`. The API key of a scrape is passed on to the server."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Gpus())
    registry.register(TrtLlmCollector(lambda: [_on_tensorrt_llm()]))
    client = httpx.Client(timeout=10.0)

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {"authorization": self.headers.get("authorization", "")}
            answer = client.get(metrics_url, headers=headers)
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers["content-type"])
            self.end_headers()
            self.wfile.write(answer.content)
            if answer.status_code == 200:
                self.wfile.write(generate_latest(registry))

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="page-with-gpus")
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        client.close()
