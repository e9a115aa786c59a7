"""The events that a model's responses become."""

from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.text.citations import EncodingProgress, cite, encode_progress, encode_source
from sluice.pipelines.text.types import (
    Retrieval,
    TextDetail,
    TextEvent,
)
from sluice.serving.request import InferResponse
from sluice.serving.tensors.tensor import Tensor
from tests.pipelines.text.tensor_models import (
    DECOUPLED,
    OTHER,
    SOURCE,
    Told,
    chat_of,
    config,
    count,
    events_of,
    text_request,
    texts,
)
from tests.pulled import pulled
from tests.serving.backends.ensemble.parts import HeldModel


async def test_text_comes_in_pieces_and_its_end_with_the_counts() -> None:
    end = {
        "finish_reason": texts("length"),
        "response": texts("!"),
        "num_input_tokens": count(12),
        "num_output_tokens": count(3),
        "num_cached_tokens": count(8),
    }
    outputs = "response finish_reason"
    events = await events_of(Told(config(outputs=outputs), {"response": texts("Hé")}, {"response": texts("")}, end))
    assert events == [
        TextEvent(text="Hé", num_tokens=0, prompt_tokens=0, completion_tokens=0),
        TextEvent(
            text="!",
            num_tokens=3,
            prompt_tokens=12,
            completion_tokens=3,
            finish_reason=FinishReason.LENGTH,
            cached_tokens=8,
        ),
    ]


async def test_a_model_that_tells_nothing_of_its_end_has_stopped() -> None:
    [only] = await events_of(Told(config(), {"response": texts("all of it")}))
    assert (only.text, only.finish_reason, only.completion_tokens, only.detail) == ("all of it", "stop", 0, None)


async def test_an_end_without_outputs_keeps_earlier_values() -> None:
    model = config(outputs="response finish_reason")
    model = Told(model, {"response": texts("a"), "finish_reason": texts("length"), "num_output_tokens": count(2)}, {})
    events = await events_of(model)
    assert [event.text for event in events] == ["a", ""]
    assert (events[-1].finish_reason, events[-1].completion_tokens) == ("length", 2)


async def test_sources_come_before_the_text_and_citations_at_the_end() -> None:
    answer = ("Tensors have ", "a shape each [1].")
    found = {"sources": texts(encode_source(SOURCE), b""), "dropped": texts(encode_source(OTHER))}
    events = await events_of(
        Told(
            config(outputs="response sources dropped", more=DECOUPLED),
            found,
            {"response": texts(answer[0])},
            {"response": texts(answer[1])},
        )
    )
    assert [event.text for event in events] == ["", *answer]
    retrieval = Retrieval(sources=(SOURCE,), dropped=(OTHER,))
    assert events[0].detail == TextDetail(retrieval=retrieval)
    citations = tuple(cite("".join(answer), (SOURCE,)))
    assert citations
    assert events[-1].detail == TextDetail(retrieval=Retrieval((SOURCE,), (OTHER,), citations))


async def test_the_progress_of_encoding_comes_with_the_sources() -> None:
    progress = EncodingProgress("docs", 12, 610)
    said = {"sources": texts(b""), "encoding": texts(encode_progress(progress)), "response": texts("a")}
    for event in await events_of(Told(config(outputs="response sources encoding"), said)):
        assert event.detail is not None and event.detail.retrieval == Retrieval(encoding=progress)
    first, _ = await events_of(Told(config(outputs="response sources encoding"), {**said, "encoding": texts("")}))
    assert first.detail == TextDetail(retrieval=Retrieval())


async def test_what_is_no_progress_of_encoding_is_an_error() -> None:
    with pytest.raises(SluiceError, match="gave an output 'encoding' that is no progress"):
        await events_of(Told(config(outputs="response encoding"), {"encoding": texts("soon")}))


async def test_one_response_with_all_makes_events_in_the_same_order() -> None:
    outputs = {"response": texts("a"), "sources": texts(encode_source(SOURCE))}
    events = await events_of(Told(config(outputs="response sources"), outputs))
    assert [(event.text, event.finish_reason) for event in events] == [("", None), ("a", "stop")]
    assert events[0].detail is not None


async def test_an_empty_retrieval_makes_an_event_too() -> None:
    model = Told(config(outputs="response sources"), {"response": texts("a"), "sources": texts(b"")})
    first, last = await events_of(model)
    assert first.detail == last.detail == TextDetail(retrieval=Retrieval())


async def test_an_element_that_is_no_source_is_the_model_s_fault() -> None:
    model = Told(config(outputs="response sources"), {"response": texts("a"), "sources": texts("{}")})
    with pytest.raises(SluiceError, match="model 'pipeline' gave an element of 'sources' that is no source") as caught:
        await events_of(model)
    assert caught.value.code is ErrorCode.INTERNAL


async def test_an_error_is_raised_after_the_text_before_it() -> None:
    model = Told(config(), {"response": texts("a")}, ends=False)
    async with aclosing(pulled(chat_of(model).generate, text_request())) as events:
        assert (await anext(events)).text == "a"
        model.jobs[0].respond(InferResponse(error=SluiceError(ErrorCode.UNAVAILABLE, "gone")))
        with pytest.raises(SluiceError, match="gone"):
            await anext(events)


async def test_closing_cancels() -> None:
    model = Told(config(), {"response": texts("a")}, ends=False)
    async with aclosing(pulled(chat_of(model).generate, text_request())) as events:
        await anext(events)
        assert model.num_in_flight == 1
    assert (model.num_cancelled, model.num_in_flight) == (1, 0)


async def test_text_that_is_no_utf8_is_shown_as_well_as_can_be() -> None:
    model = config()
    raw = Tensor("response", "BYTES", (1,), array=np.array([b"\xffa"], object))

    class Raw(HeldModel):
        def _start(self, job: Any) -> None:
            job.respond(InferResponse([raw]))

    [only] = await events_of(Raw(model.config))
    assert only.text == "�a"
