"""An LLM that is unloaded leaves little behind: not its tokenizer, which may take a hundred megabytes."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig, Runtime
from pipelines.llm.backend import LlmBackend
from pipelines.llm.services import LlmServices
from pipelines.text.tokenizer import Tokenizer
from serving.backend import BackendContext
from serving.model import Model
from serving.spec import ModelSource
from tests.gateway.tiny_checkpoint import write_tiny_checkpoint
from tests.pipelines.llm.calls import ask
from tests.serving.config.parts import parse_config

pytestmark = pytest.mark.slow


@pytest.fixture
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class NoModels:
    def find(self, name: str, version: int = -1) -> Model:
        raise AssertionError("an LLM calls no other model")


def engine_config(path: str, runtime: Runtime | None) -> EngineConfig:
    return EngineConfig(model_path=path, dtype="f32", num_blocks=64, max_model_len=512, num_threads=1)


async def tokenizer_of_unloaded(source: ModelSource) -> "weakref.ref[Tokenizer]":
    backend, context = LlmBackend(LlmServices(engine_config)), BackendContext(NoModels())
    config = await backend.complete(source, context)
    model = await backend.load(ModelSource(source.folder, source.version, config), context)
    await ask(model, {"text_input": "What is a sluice for?", "max_tokens": 4})
    assert model.statistics.count_pending() == 0
    await model.unload()
    return weakref.ref(model.text.tokenizer)


@pytest.mark.usefixtures("without_garbage_collection")
async def test_its_tokenizer_does_not_wait_for_the_garbage_collector(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "1")
    config, _ = parse_config('name: "tiny" backend: "llm"', "config.pbtxt")
    tokenizer = await tokenizer_of_unloaded(ModelSource(tmp_path, 1, config))
    assert tokenizer() is None
