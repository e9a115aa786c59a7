"""The real client and the real engine process over the stand-in for TensorRT-LLM."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.client.stream import GenerationStream
from sluice.engine.config import EngineConfig, Runtime
from sluice.engine.types import FinishReason, GenerateRequest, SamplingParams, TokenLogprob
from sluice.errors import SluiceError
from tests.engine.fake_runner import echo_next
from tests.stand_ins.engines import fork_engines
from tests.stand_ins.model_folders import make_checkpoint, make_compiled_engine
from tests.stand_ins.paths import PYTHONPATH, STAND_INS
from tests.waiting import PATIENCE_S, until

VOCAB_SIZE = 4096
EOS = 2


class StandIn:
    """The surroundings of the next engine processes: a model folder, and the stand-in's environment."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        folder: Path,
        version: str,
        *,
        is_compiled: bool = False,
        has_tokenizer: bool = False,
    ) -> None:
        self._monkeypatch = monkeypatch
        fork_engines(monkeypatch)
        self.model = make_checkpoint(folder / "checkpoint", with_tokenizer=has_tokenizer)
        self._defaults: dict[str, Any] = {"runtime": Runtime.TENSORRT_LLM}
        if is_compiled:  # it does not say itself where sequences end
            self._defaults["tokenizer_path"] = str(self.model)
            self.model = make_compiled_engine(folder / "engine")
        self.record = folder / "record"
        monkeypatch.syspath_prepend(STAND_INS)
        monkeypatch.setenv("PYTHONPATH", PYTHONPATH, prepend=os.pathsep)
        self.set(VERSION=version)

    def set(self, **variables: object) -> "StandIn":
        for name, value in variables.items():
            self._monkeypatch.setenv(f"STAND_IN_{name}", str(value))
        return self

    def config(self, **limits: Any) -> EngineConfig:
        return EngineConfig(**{"model_path": str(self.model), **self._defaults, **limits})

    @asynccontextmanager
    async def client(self, heartbeat_timeout_s: float = 5.0, **limits: Any) -> AsyncIterator[ProcessEngineClient]:
        client = ProcessEngineClient(self.config(**limits), heartbeat_timeout_s=heartbeat_timeout_s)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await client.start()
                yield client
        finally:
            await client.stop()

    def recorded(self) -> list[dict[str, Any]]:
        """Return the stand-in's record of arguments and requests; needs RECORD. The last line may not be whole yet."""
        return [json.loads(line) for line in self.record.read_text().splitlines(keepends=True) if line[-1] == "\n"]


def request(prompt: list[int], max_tokens: int = 20, **fields: Any) -> GenerateRequest:
    names = {"timeout_s", "queue_timeout_s", "priority", "tenant", "adapter", "cache_salt", "session"}
    own = {name: fields.pop(name) for name in names & fields.keys()}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **fields})
    return GenerateRequest(request_id=f"r{prompt[0]}", prompt_token_ids=prompt, sampling=params, **own)


def echo(prompt: list[int], num_tokens: int) -> list[int]:
    """Return the answer of our own executor over EchoRunner."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(echo_next(ids, VOCAB_SIZE))
    return ids[len(prompt) :]


class Answer:
    """A stream read to its end."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.reason: FinishReason | None = None
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.num_cached: int | None = None
        self.num_events = 0


async def answer(stream: GenerationStream) -> Answer:
    whole = Answer()
    async for event in stream:
        assert whole.reason is None
        whole.num_events += 1
        whole.token_ids += event.token_ids
        whole.reason = event.finish_reason
        if event.detail is not None:
            whole.logprobs += event.detail.logprobs or []
            whole.prompt_logprobs = event.detail.prompt_logprobs or whole.prompt_logprobs
            if event.detail.num_cached_tokens is not None:
                whole.num_cached = event.detail.num_cached_tokens
    return whole


async def tokens(stream: GenerationStream) -> list[int]:
    return (await answer(stream)).token_ids


async def failure_of(stream: GenerationStream) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        await answer(stream)
    return caught.value


async def until_idle(client: ProcessEngineClient) -> None:
    await until(lambda: not (client.stats.num_running or client.stats.num_waiting or client.stats.num_blocks_used))


async def running(client: ProcessEngineClient, asked: GenerateRequest, num_tokens: int = 1) -> GenerationStream:
    """Return a stream that has brought so many tokens, which are not yet fetched."""
    stream = client.submit(asked)
    await until(lambda: len(stream.output_token_ids) >= num_tokens)
    return stream


def ranks(client: ProcessEngineClient) -> list[psutil.Process]:
    """Return the processes that the engine started."""
    assert client.pid is not None
    return psutil.Process(client.pid).children(recursive=True)
