from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.engine.config import EngineConfig
from sluice.pipelines.llm.configuration import default_llm_config
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.text.sampling import SamplingDefaults
from sluice.pipelines.text.tokenizer import Tokenizer
from tests import paths
from tests.engine.in_process_client import InProcessEngineClient
from tests.pipelines.llm.calls import Record
from tests.pipelines.llm.stepped_runner import SteppedRunner
from tests.serving.config.parts import read_config

SEED_CONFIGS = paths.DATA / "seed_configs"


@pytest.fixture
def records() -> list[Record]:
    return []


@pytest.fixture
async def runner() -> SteppedRunner:
    return SteppedRunner(num_blocks=256, block_size=4, max_model_len=512)


@pytest.fixture
async def engine(runner: SteppedRunner, rill_path: Path) -> AsyncIterator[InProcessEngineClient]:
    """A real executor on a runner without a model, whose answers depend on every token of the prompt."""
    client = InProcessEngineClient(EngineConfig(model_path=str(rill_path)), runner)
    await client.start()
    yield client
    await client.stop()


@pytest.fixture
async def make(
    engine: InProcessEngineClient, runner: SteppedRunner, rill: Tokenizer, records: list[Record]
) -> AsyncIterator[Callable[[ModelConfig], LlmModel]]:
    """Makes models over the one engine."""
    models: list[LlmModel] = []

    def make_one(config: ModelConfig) -> LlmModel:
        def open_record(model: str, protocol: str) -> Record:
            records.append(Record(model, protocol))
            return records[-1]

        text = LlmText(config.name, rill, engine, SamplingDefaults(), created=1, open_record=open_record)
        models.append(LlmModel(config, text, engine))
        return models[-1]

    yield make_one
    runner.release()
    for model in models:
        await model.close()


@pytest.fixture
def model(make: Callable[[ModelConfig], LlmModel]) -> LlmModel:
    """With everything declared, without a batch dimension."""
    return make(default_llm_config("echo"))


@pytest.fixture
def batched(make: Callable[[ModelConfig], LlmModel]) -> LlmModel:
    """With everything declared, and a batch dimension."""
    config = default_llm_config("echo")
    config.max_batch_size = 8
    return make(config)


@pytest.fixture
def seed(make: Callable[[ModelConfig], LlmModel]) -> LlmModel:
    """Seed 000's configuration, as printed."""
    return make(read_config(SEED_CONFIGS / "000_llama3_8b.pbtxt")[0])
