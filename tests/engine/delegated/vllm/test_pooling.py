"""Vectors and scores of vLLM: what is asked for, and what comes back."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sluice.engine.config import Task
from sluice.engine.delegated.interface import ResponseDelta
from sluice.engine.delegated.vllm.pooling import (
    PooledRequestHandle,
    check_task,
    let_prompts_fit,
    longest_prompt,
    pooling_params,
)
from sluice.engine.types import EventDetail, FinishReason, GenerateRequest, SamplingParams
from sluice.errors import ErrorCode, SluiceError
from tests.engine.delegated.vllm.fake_library import FakeLibrary
from tests.engine.delegated.vllm.test_responses import nothing


def request(second_text_start: int = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id="1", prompt_token_ids=[1, 2], sampling=SamplingParams(), second_text_start=second_text_start
    )


def output(*values: float, error: Any = None, num_cached: int = 0) -> SimpleNamespace:
    data = SimpleNamespace(float=lambda: SimpleNamespace(numpy=lambda: np.array(values, np.float32)))
    return SimpleNamespace(outputs=SimpleNamespace(data=data), finished=True, num_cached_tokens=num_cached, error=error)


def read(response: Any) -> ResponseDelta:
    async def abort() -> None:
        pass

    return PooledRequestHandle(nothing(), request(), abort).read(response)


@pytest.mark.parametrize(
    ("task", "start", "num_types", "expected"),
    [
        (Task.EMBED, 0, 2, {"task": "embed", "use_activation": False}),
        (Task.SCORE, 5, 2, {"task": "classify", "extra_kwargs": {"compressed_token_type_ids": 5}}),
        (Task.SCORE, 5, 1, {"task": "classify"}),  # its engine would end of token types that it does not know
        (Task.SCORE, 0, 2, {"task": "classify"}),
    ],
)
def test_token_types_go_to_models_that_have_them(
    task: Task, start: int, num_types: int, expected: dict[str, Any]
) -> None:
    assert vars(pooling_params(FakeLibrary(), request(start), task, num_types)) == expected


def test_the_one_output_is_a_vector() -> None:
    values = np.array([1.0, 2.0], np.float32).tobytes()
    detail = EventDetail(2, generation_logits=values)
    assert read(output(1.0, 2.0, num_cached=32)) == ResponseDelta([0], FinishReason.LENGTH, detail)


def test_an_end_without_a_vector_is_no_vector() -> None:
    assert read(output()).finish_reason is FinishReason.CANCELLED
    with pytest.raises(SluiceError) as caught:
        read(output(error="multimodal_cache_miss"))
    assert caught.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize(("is_chunked", "expected"), [(True, 2048), (False, 8192)])
def test_a_step_takes_prompts_that_cannot_be_cut(is_chunked: bool, expected: int) -> None:
    model = SimpleNamespace(is_chunked_prefill_supported=is_chunked, max_model_len=8192)
    arguments = SimpleNamespace(max_num_batched_tokens=2048, create_model_config=lambda: model)
    let_prompts_fit(arguments)
    assert arguments.max_num_batched_tokens == expected


@pytest.mark.parametrize(
    ("architecture", "kind", "max_model_len", "expected"),
    [
        ("XLMRobertaModel", "absolute", 514, 512),
        ("RobertaForSequenceClassification", "absolute", 256, 256),
        ("XLMRobertaModel", "rotary", 514, 514),
        ("BertModel", "absolute", 514, 514),
    ],
)
def test_robertas_positions_begin_behind_its_padding(
    architecture: str, kind: str, max_model_len: int, expected: int
) -> None:
    config = SimpleNamespace(max_position_embeddings=514, pad_token_id=1, position_embedding_type=kind)
    model = SimpleNamespace(architecture=architecture, hf_config=config, max_model_len=max_model_len)
    assert longest_prompt(model) == expected


@pytest.mark.parametrize(
    ("task", "supported", "labels", "uses_separators", "message"),
    [
        (Task.EMBED, ("classify",), 1, True, "does not serve /m for embed but for classify; give another --task"),
        (Task.SCORE, (), 1, True, "does not serve /m for score but for text"),
        (Task.SCORE, ("classify",), 3, True, "a cross-encoder with num_labels 1; /m has 3"),
        (Task.SCORE, ("classify",), 1, False, "/m is a language model"),
        (Task.SCORE, ("classify",), 1, True, None),
        (Task.EMBED, ("embed",), 3, False, None),
    ],
)
def test_a_model_must_bring_what_it_is_served_for(
    task: Task, supported: tuple[str, ...], labels: int, uses_separators: bool, message: str | None
) -> None:
    model = SimpleNamespace(model="/m", hf_config=SimpleNamespace(num_labels=labels), use_sep_token=uses_separators)
    if message is None:
        check_task(model, supported, task)
        return
    with pytest.raises(SluiceError, match=message) as caught:
        check_task(model, supported, task)
    assert caught.value.code is ErrorCode.UNIMPLEMENTED
