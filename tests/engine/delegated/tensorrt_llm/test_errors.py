from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from sluice.engine.config import EngineConfig, Task
from sluice.engine.delegated.tensorrt_llm.configuration.encoding import Encoder
from sluice.engine.delegated.tensorrt_llm.llm import load_llm
from sluice.engine.delegated.tensorrt_llm.pooling import EncodeHandle, EncodeQueue
from sluice.engine.delegated.tensorrt_llm.responses import classify
from sluice.engine.types import GenerateRequest, SamplingParams
from sluice.errors import ErrorCode, SluiceError
from tests.errors import error_of


class RequestError(RuntimeError): ...


class EngineDeadError(RuntimeError): ...


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("LLM is shutting down"),
        RuntimeError("The executor has failed: rank 1 is gone"),
        RuntimeError("Executor worker died during initialization"),
        EngineDeadError("model worker died"),
    ],
)
def test_what_ends_the_engine(error: Exception) -> None:
    wrapped = RequestError("could not be sent")
    wrapped.__cause__ = error
    for each in (error, wrapped):
        assert classify(each, at_submit=False).is_fatal and classify(each, at_submit=True).is_fatal


@pytest.mark.parametrize(
    "error",
    [
        RequestError("prompt is too long"),
        RequestError("guided decoding error: no rule 'executor has failed' in the grammar"),
        ValueError("shutting down"),
        RuntimeError("CUDA error: misaligned"),
    ],
)
def test_what_need_not(error: Exception) -> None:
    assert not classify(error, at_submit=False).is_fatal


def refusal(error: Exception) -> SluiceError:
    return classify(error, at_submit=True).error


def failure(error: Exception) -> SluiceError:
    return classify(error, at_submit=False).error


def test_an_error_that_is_a_response_is_known_by_its_class() -> None:
    assert classify(RequestError("any"), at_submit=False).is_response
    assert not classify(RuntimeError("any"), at_submit=False).is_response


def test_whose_fault_it_is() -> None:
    limit = "The sum of prompt length (9) should not exceed max_num_tokens (4)"
    assert refusal(ValueError(limit)).code is ErrorCode.INVALID
    assert refusal(TypeError("unexpected keyword")).code is ErrorCode.INTERNAL
    assert failure(RequestError(limit)).code is ErrorCode.INVALID
    assert limit in failure(RequestError(limit)).message
    assert failure(RequestError("Guided decoding error: unclosed class in [0-9")).code is ErrorCode.INVALID
    assert failure(RequestError("Guided decoding error: internal error in fill")).code is ErrorCode.INTERNAL
    internal = failure(RequestError("CUDA error: invalid argument"))
    assert (internal.code, "CUDA" in internal.message) == (ErrorCode.INTERNAL, False)
    assert refusal(RequestError(limit)).code is ErrorCode.INVALID
    assert refusal(RequestError("CUDA error: invalid argument")).code is ErrorCode.INTERNAL
    own = SluiceError(ErrorCode.DEADLINE, "too late")
    assert failure(own) is refusal(own) is own


@pytest.mark.parametrize(
    "text",
    [
        "The number of context tokens (9) exceeds the limit value (8)",
        "repetition_penalty / presence_penalty / frequency_penalty require 'enable_penalty: true' in the speculative "
        "decoding config",
        "min_p is not supported with one-model speculative decoding.",
        "TorchSampler does not support repetition, presence, or frequency penalties with beam search.",
    ],
)
def test_texts_that_blame_the_request(text: str) -> None:
    assert failure(RequestError(text)).code is ErrorCode.INVALID


@pytest.mark.parametrize(
    "text",
    [
        "Beam search does not support returning multiple logprobs per request",
        "Beam search only supports returning the sampled logprob per token",
    ],
)
def test_a_text_that_was_meant_for_another_request_of_the_batch_blames_nobody(text: str) -> None:
    assert failure(RequestError(text)).code is ErrorCode.INTERNAL


def test_an_argument_that_the_llm_class_itself_refuses_is_named(stand_in: ModuleType, checkpoint: Path) -> None:
    error = error_of(load_llm, EngineConfig(model_path=str(checkpoint), llm_arguments={"stream_interval": "often"}))
    assert (error.code, error.param) == (ErrorCode.INVALID, "stream_interval")
    reason = "Input should be a valid integer, got 'often'"
    assert error.message == f"TensorRT-LLM {stand_in.__version__} refuses stream_interval: {reason}"


async def test_a_batch_with_too_few_answers_fails_its_texts() -> None:
    encoder = Encoder(Task.EMBED, "Qwen3ForTextEmbedding", 4)
    queue = EncodeQueue(SimpleNamespace(encode=lambda prompts: []), encoder, 8, 64)
    asked = GenerateRequest(request_id="r", prompt_token_ids=[1], sampling=SamplingParams())
    handles = [EncodeHandle(queue, asked, encoder) for _ in range(2)]
    for each in handles:
        queue.add(each)
    for each in handles:
        with pytest.raises(ValueError, match="shorter"):
            await anext(aiter(each))
