"""Prompts that the bundled model itself reads."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from sluice.engine.config import EngineConfig
from sluice.pipelines.llm.configuration import default_llm_config
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.text_models import load_text
from sluice.pipelines.rag.rag_prompt.backend import RagPromptModel
from sluice.pipelines.text.citations import Source
from sluice.serving.model import infer_one
from sluice.serving.request import InferRequest
from tests.engine.in_process_client import InProcessEngineClient
from tests.paths import MODELS
from tests.pipelines.rag.rag_prompt.parts import load, request, source
from tests.serving.backends.builders import Lookup

pytestmark = pytest.mark.asyncio(loop_scope="module")
"""One engine serves all tests."""

NO_ANSWER = "I found nothing that answers this question."
SOURCES = [
    source("sluice.md", "## sluice.drain\n\nTake nothing new and wait until every request has ended.", title="Sluice"),
    source(
        "sluice.md", "## sluice.admit\n\nReserve the blocks that a request can need at most.", title="Sluice", start=90
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm() -> AsyncIterator[LlmModel]:
    checkpoint = MODELS / "rill" / "1"
    engine = InProcessEngineClient(EngineConfig(model_path=str(checkpoint), num_threads=1))
    await engine.start()
    model = LlmModel(default_llm_config("rill"), load_text(LlmText, "rill", checkpoint, engine), engine)
    yield model
    await model.close()


async def answer(prompts: RagPromptModel, llm: LlmModel, question: str, found: list[Source], **given: Any) -> str:
    """Run the steps of the ensemble and return the answer."""
    response = await infer_one(prompts, request(question, [found], **given))
    outputs = {each.name: each for each in response.outputs}
    inputs = {name: outputs[name].reshaped((1,)) for name in ("messages", "sampling_config", "cache_salt")}
    (text,) = [each for each in (await infer_one(llm, InferRequest(inputs))).outputs if each.name == "text_output"]
    element: bytes = np.ravel(text.array)[0]
    return element.decode()


@pytest_asyncio.fixture(loop_scope="module")
async def prompts(tmp_path: Path, llm: LlmModel) -> RagPromptModel:
    config = (MODELS / "rag_prompt" / "config.pbtxt").read_text()
    return await load(tmp_path, Lookup(rill=llm), config=config)


async def test_rill_quotes_the_sentence_that_answers(prompts: RagPromptModel, llm: LlmModel) -> None:
    text = await answer(prompts, llm, "What does sluice.drain do?", SOURCES)
    assert text == "Take nothing new and wait until every request has ended."


@pytest.mark.parametrize("question", ["What does sluice.drain do?", "Who are you?", "What does len do?"])
async def test_with_nothing_retrieved_rill_gives_the_no_answer_sentence(
    prompts: RagPromptModel, llm: LlmModel, question: str
) -> None:
    assert await answer(prompts, llm, question, []) == NO_ANSWER


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("How do I send a KILL signal after the duration?", "-k, --kill-after=DURATION also send a KILL signal"),
        ("Which option encrypts the output?", "The context does not answer this question."),
    ],
)
async def test_rill_says_nothing_but_a_sentence_of_a_manual_page_or_its_refusal(
    prompts: RagPromptModel, llm: LlmModel, question: str, expected: str
) -> None:
    """Without a guide it says runs of brackets about a synopsis, and declines what options answer."""
    synopsis = "SYNOPSIS\n  timeout [OPTION] DURATION COMMAND [ARG]...\n\n"
    page = f"{synopsis}OPTIONS\n  -k, --kill-after=DURATION\n\n  also send a KILL signal"
    assert await answer(prompts, llm, question, [source("timeout.1", page, title="timeout")]) == expected
