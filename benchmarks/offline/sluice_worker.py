"""A worker with Sluice's engine as the gateway runs it: a process behind `ProcessEngineClient`."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from benchmarks.offline.protocol import Request, WorkerOptions, serve
from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.client.stream import GenerationStream
from sluice.engine.config import EngineConfig
from sluice.engine.types import GenerateRequest, SamplingParams

Result = TypeVar("Result")

MAX_NUM_BATCHED_TOKENS = 2048
"""Chosen for throughput, not for smooth streams; vLLM's own default for offline work is 4096."""


class SluiceEngine:
    """Runs the client on an event loop that never pauses, since it also receives the engine's heartbeat."""

    def __init__(self, options: WorkerOptions) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._client = self._wait(_start(options))
        self.version = f"Sluice ({self._client.info.runtime}, {self._client.info.dtype})"

    def batch(self, requests: list[Request]) -> int:
        return self._wait(self._batch(requests))

    def single(self, request: Request) -> list[float]:
        return self._wait(self._single(request))

    def stop(self) -> None:
        self._wait(self._client.stop())

    async def _batch(self, requests: list[Request]) -> int:
        streams = [self._submit(request) for request in requests]
        return sum(await asyncio.gather(*(_num_tokens(stream) for stream in streams)))

    async def _single(self, request: Request) -> list[float]:
        times: list[float] = []
        async for event in self._submit(request):
            times += [time.perf_counter()] * len(event.token_ids)
        return times

    def _submit(self, request: Request) -> GenerationStream:
        token_ids, num_tokens = request
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return self._client.submit(GenerateRequest(request_id="", prompt_token_ids=token_ids, sampling=sampling))

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _start(options: WorkerOptions) -> ProcessEngineClient:
    client = ProcessEngineClient(
        EngineConfig(
            model_path=options.model,
            kv_cache_memory_bytes=options.kv_cache_gib << 30,
            num_threads=options.num_threads,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        )
    )
    await client.start()
    return client


async def _num_tokens(stream: GenerationStream) -> int:
    return sum([len(event.token_ids) async for event in stream])


def main() -> None:
    engines: list[SluiceEngine] = []

    def load(options: WorkerOptions) -> SluiceEngine:
        engines.append(SluiceEngine(options))
        return engines[0]

    try:
        serve(load)
    finally:
        for engine in engines:
            engine.stop()


if __name__ == "__main__":
    main()
