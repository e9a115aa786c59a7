from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sluice.engine.config import EngineConfig
from sluice.pipelines.llm.configuration import default_llm_config
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.text.sampling import SamplingDefaults
from sluice.pipelines.text.tokenizer import Tokenizer
from tests.engine.fake_runner import EchoRunner
from tests.engine.in_process_client import InProcessEngineClient
from tests.serving.backends.builders import Lookup


@pytest.fixture
async def llm(rill: Tokenizer, rill_path: Path) -> AsyncIterator[LlmModel]:
    """The bundled model's text side, with a context of 512 tokens, on a runner without a model."""
    runner = EchoRunner(num_blocks=256, block_size=4, max_model_len=512)
    engine = InProcessEngineClient(EngineConfig(model_path=str(rill_path)), runner)
    await engine.start()
    model = LlmModel(default_llm_config("rill"), LlmText("rill", rill, engine, SamplingDefaults(), created=1), engine)
    yield model
    await model.close()


@pytest.fixture
def lookup(llm: LlmModel) -> Lookup:
    return Lookup(rill=llm)
