"""An LLM as a step: its pieces stream through the steps after it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sluice.engine.config import EngineConfig
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.configuration import default_llm_config
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.text.sampling import SamplingDefaults
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.serving.backends.ensemble.backend import EnsembleModel
from sluice.serving.model import infer_one
from sluice.serving.request import InferRequest
from sluice.serving.tensors.tensor import Array, Tensor
from tests.engine.in_process_client import InProcessEngineClient
from tests.pipelines.llm.stepped_runner import SteppedRunner
from tests.serving.backends.builders import Lookup, infer_stream
from tests.serving.backends.ensemble.parts import FunctionModel, config_of, load, request, simple_config
from tests.waiting import PATIENCE_S

LOUD = """
    name: "loud" platform: "ensemble"
    input { name: "prompt" data_type: TYPE_STRING dims: [1] } input { name: "count" data_type: TYPE_INT32 dims: [1] }
    input { name: "stream" data_type: TYPE_BOOL dims: [1] }
    output { name: "answer" data_type: TYPE_STRING dims: [-1] }
    ensemble_scheduling {
      step {
        model_name: "llm" model_version: -1
        input_map { key: "text_input" value: "prompt" } input_map { key: "max_tokens" value: "count" }
        input_map { key: "stream" value: "stream" } output_map { key: "text_output" value: "said" }
      }
      step {
        model_name: "shout" model_version: -1
        input_map { key: "X" value: "said" } output_map { key: "Y" value: "answer" }
      }
    }
"""

AFTER = """
    name: "after" platform: "ensemble"
    input { name: "question" data_type: TYPE_STRING dims: [1] }
    output { name: "answer" data_type: TYPE_STRING dims: [1] }
    ensemble_scheduling {
      step {
        model_name: "first" model_version: -1
        input_map { key: "X" value: "question" } output_map { key: "Y" value: "prompt" }
      }
      step {
        model_name: "llm" model_version: -1
        input_map { key: "text_input" value: "prompt" } output_map { key: "text_output" value: "answer" }
      }
    }
"""


def _upper(X: Array) -> dict[str, Array]:
    return {"Y": np.array([element.upper() for element in X.ravel()], object)}


@pytest.fixture
async def llm(rill: Tokenizer, rill_path: Path) -> AsyncIterator[LlmModel]:
    runner = SteppedRunner(num_blocks=256, block_size=4, max_model_len=512)
    engine = InProcessEngineClient(EngineConfig(model_path=str(rill_path)), runner)
    await engine.start()
    text = LlmText("llm", rill, engine, SamplingDefaults(), created=1)
    model = LlmModel(default_llm_config("llm"), text, engine)
    yield model
    await model.close()
    await engine.stop()


@pytest.fixture
async def loud(llm: LlmModel) -> EnsembleModel:
    shout = FunctionModel(simple_config("shout", data_type="TYPE_STRING"), _upper)
    return await load(config_of(LOUD), Lookup(llm, shout))


def asked(**names: str) -> InferRequest:
    """Make the same request with the names of the ensemble, or of the LLM."""
    values: dict[str, Array] = {
        "prompt": np.array([b"hello"], object),
        "count": np.array([20], np.int32),
        "stream": np.array([True]),
    }
    return request({names.get(name, name): array for name, array in values.items()})


async def test_each_piece_goes_through(llm: LlmModel, loud: EnsembleModel) -> None:
    async with asyncio.timeout(PATIENCE_S):
        direct = [
            tensor.array.ravel()[0]
            async for response in infer_stream(llm, asked(prompt="text_input", count="max_tokens"))
            for tensor in response.outputs
            if tensor.name == "text_output"
        ]
        responses = [response async for response in infer_stream(loud, asked())]
    pieces = [tensor.array.ravel()[0] for response in responses for tensor in response.outputs]
    assert len(direct) > 1
    assert b"".join(pieces) == b"".join(direct).upper()
    assert responses[-1].is_final
    assert loud.spec.is_decoupled


async def test_leaving_cancels_the_llm(llm: LlmModel, loud: EnsembleModel) -> None:
    async with asyncio.timeout(PATIENCE_S):
        async with aclosing(infer_stream(loud, asked())) as responses:
            await anext(responses)
        await llm.wait_idle()
    assert llm.statistics.infer.fail.count == 1


async def test_without_streaming_all_comes_in_one_response(llm: LlmModel, loud: EnsembleModel) -> None:
    given = asked()
    given.inputs["stream"] = Tensor.of("stream", np.array([False]))
    assert not loud.is_decoupled_for(given)
    async with asyncio.timeout(PATIENCE_S):
        response = await infer_one(loud, given)
        parts = [part async for part in infer_stream(loud, asked())]
    whole = b"".join(tensor.array.ravel()[0] for part in parts for tensor in part.outputs)
    assert response.outputs[0].array.tolist() == [whole]
    assert llm.statistics.infer.success.count == 2


async def test_a_full_queue_refuses_before_any_step_runs(llm: LlmModel) -> None:
    first = FunctionModel(simple_config("first", data_type="TYPE_STRING"), lambda X: {"Y": X})
    model = await load(config_of(AFTER), Lookup(first, llm))
    engine = llm.engine
    assert isinstance(engine, InProcessEngineClient)
    idle = engine.stats
    waiting = engine.info.max_num_seqs + engine.config.max_queued_requests
    engine.stats = msgspec.structs.replace(idle, num_waiting=waiting, predicted_wait_s=3.0)
    given = {"question": np.array([b"hello"], object)}
    with pytest.raises(SluiceError, match="in ensemble 'after', model 'llm': the queue is full") as refused:
        model.submit(request(given), lambda _: None)
    assert (refused.value.code, refused.value.retry_after_s) == (ErrorCode.OVERLOADED, 3.0)
    assert first.requests == []
    assert model.num_in_flight == llm.num_in_flight == 0
    engine.stats = idle
    model.submit(request(given), lambda _: None).cancel()
    assert len(first.requests) == 1
