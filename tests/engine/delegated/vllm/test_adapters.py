"""Adapters that come and go while vLLM serves."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.delegated.vllm.arguments import VllmPlan
from sluice.engine.delegated.vllm.llm import Vllm
from sluice.engine.types import GenerateRequest, SamplingParams
from sluice.errors import ErrorCode, SluiceError
from tests.engine.delegated.vllm.fake_library import FakeLibrary


class EngineDeadError(Exception):
    """vLLM's, as the adapter knows it: by its name."""


class Engine:
    """vLLM's engine as far as adapters go."""

    vllm_config = SimpleNamespace(lora_config=SimpleNamespace(max_lora_rank=16))

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.may_go = asyncio.Event()
        self.numbers: list[int] = []

    async def add_lora(self, made: Any) -> None:
        if self.error is not None:
            raise self.error
        self.numbers.append(made.lora_int_id)

    async def remove_lora(self, number: int) -> None:
        await self.may_go.wait()
        self.numbers.remove(number)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def vllm(engine: Engine) -> Vllm:
    made = Vllm(VllmPlan({}, has_tokenizer=True), FakeLibrary(), EngineConfig(model_path="/m"))
    made._llm = engine
    return made


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    return str(tmp_path)


async def test_a_request_beside_an_unload_is_taken(vllm: Vllm, engine: Engine, adapter: str) -> None:
    await vllm.load_adapter("a", adapter)
    unloading = asyncio.create_task(vllm.unload_adapter("a"))
    await asyncio.sleep(0)
    prepared = vllm.prepare(
        GenerateRequest(request_id="1", prompt_token_ids=[1, 2], sampling=SamplingParams(), adapter="a")
    )
    assert prepared.keywords["lora_request"].lora_name == "a-1"
    engine.may_go.set()
    await unloading
    assert engine.numbers == []


async def test_one_that_vllm_does_not_take_is_the_clients_mistake(vllm: Vllm, engine: Engine, adapter: str) -> None:
    engine.error = RuntimeError("no such module")
    with pytest.raises(SluiceError, match=r"vLLM does not take LoRA adapter a in .*: no such module") as caught:
        await vllm.load_adapter("a", adapter)
    assert caught.value.code is ErrorCode.INVALID
    engine.error = EngineDeadError()
    with pytest.raises(EngineDeadError):
        await vllm.load_adapter("a", adapter)
