"""Texts to vectors by an API: batches, order, and who hears of what goes wrong."""

import asyncio
import base64
from typing import Any

import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.model import Model, infer_one
from sluice.serving.tensors.tensor import Array
from tests.pipelines.remote.models import Load, request
from tests.pipelines.remote.remote_api import Exchange, HeldAnswer, RemoteApi, replying
from tests.waiting import PATIENCE_S, until


def vector_of(text: str) -> list[float]:
    return [float(len(text)), float(ord(text[0])), 0.5]


async def embeds(exchange: Exchange) -> None:
    """In base64, last one first."""
    items = [
        {"index": index, "embedding": base64.b64encode(np.array(vector_of(text), "<f4").tobytes()).decode()}
        for index, text in enumerate(exchange.body["input"])
    ]
    await exchange.reply({"object": "list", "data": items[::-1]})


async def embeds_in_numbers(exchange: Exchange) -> None:
    texts = exchange.body["input"]
    await exchange.reply({"data": [{"index": i, "embedding": vector_of(text)} for i, text in enumerate(texts)]})


async def encode(model: Model, *texts: str, **settings: Any) -> Array:
    response = await infer_one(model, request(model, {"text": list(texts)}, **settings))
    [output] = response.outputs
    assert output.name == "embeddings" and output.datatype == "FP32"
    return output.array


async def come_together(model: Model, held: HeldAnswer, first: str, *others: str) -> list["asyncio.Task[Array]"]:
    """Start requests, of which the first is at the API and the others wait."""
    tasks = [asyncio.create_task(encode(model, first))]
    await held.wait(come=1)
    tasks += [asyncio.create_task(encode(model, text)) for text in others]
    await until(lambda: model.statistics.count_pending() >= len(others))
    return tasks


@pytest.fixture
async def encoder(load: Load) -> Model:
    return await load(endpoint="embeddings", max_concurrency=1, model="e5")


async def test_rows_are_one_request(api: RemoteApi, encoder: Model) -> None:
    api.answer = embeds
    found = await encode(encoder, "a", "bcd", "ef")
    assert found.dtype == np.float32
    assert found.tolist() == [vector_of("a"), vector_of("bcd"), vector_of("ef")]
    assert api.exchanges[0].path == "/v1/embeddings"
    assert api.bodies == [{"model": "e5", "input": ["a", "bcd", "ef"], "encoding_format": "base64"}]


async def test_numbers_instead_of_base64(api: RemoteApi, encoder: Model) -> None:
    api.answer = embeds_in_numbers
    assert (await encode(encoder, "a", "bc")).tolist() == [vector_of("a"), vector_of("bc")]


async def test_waiting_requests_become_a_batch(api: RemoteApi, encoder: Model) -> None:
    api.answer = held = HeldAnswer(embeds)
    texts = ["first", "x", "yy", "zzz"]
    tasks = await come_together(encoder, held, *texts)
    held.release()
    found = await asyncio.gather(*tasks)
    assert [each.tolist() for each in found] == [[vector_of(text)] for text in texts]
    assert [len(body["input"]) for body in api.bodies] == [1, 3]
    assert encoder.statistics.infer.success.count == 4


async def test_dimensions_are_requested(api: RemoteApi, load: Load) -> None:
    api.answer = embeds
    model = await load(endpoint="embeddings", dimensions=3)
    assert (await encode(model, "a")).shape == (1, 3)
    assert api.bodies[0]["dimensions"] == 3
    other = await load(endpoint="embeddings", dimensions=4)
    with pytest.raises(SluiceError, match="3 dimensions"):
        await encode(other, "a")


async def test_without_a_batch_dimension(api: RemoteApi, load: Load) -> None:
    api.answer = embeds
    text = """
        input { name: "text" data_type: TYPE_STRING dims: [1] }
        output { name: "embeddings" data_type: TYPE_FP32 dims: [3] }
    """
    assert (await encode(await load(text, endpoint="embeddings"), "ab")).tolist() == vector_of("ab")


async def test_a_text_that_the_api_refuses_fails_alone(api: RemoteApi, encoder: Model) -> None:
    held = HeldAnswer(embeds)

    async def answer(exchange: Exchange) -> None:
        if "bad" in exchange.body["input"]:
            await exchange.reply({"error": {"message": "input is too long"}}, 400)
        else:
            await held(exchange)

    api.answer = answer
    tasks = await come_together(encoder, held, "first", "good", "bad", "fine")
    held.release()
    first, good, bad, fine = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(bad, SluiceError) and bad.code is ErrorCode.INVALID and "too long" in bad.message
    assert [len(body["input"]) for body in api.bodies] == [1, 3, 1, 1, 1]
    for found, text in ((first, "first"), (good, "good"), (fine, "fine")):
        assert isinstance(found, np.ndarray) and found.tolist() == [vector_of(text)]


async def test_bytes_that_are_no_text(api: RemoteApi, encoder: Model) -> None:
    with pytest.raises(SluiceError, match="UTF-8"):
        await infer_one(encoder, request(encoder, {"text": [b"\xff"]}))
    assert not api.exchanges


@pytest.mark.parametrize(
    "data",
    [
        [],
        [{"index": 1, "embedding": [1.0]}],
        [{"index": 0, "embedding": "?"}],
        [{"index": 0, "embedding": []}],
        [{"index": 0, "embedding": "AADAfw=="}],
        [{"index": 0}],
        "vectors",
    ],
)
async def test_an_answer_that_is_none(api: RemoteApi, encoder: Model, data: Any) -> None:
    api.answer = replying({"data": data})
    with pytest.raises(SluiceError) as caught:
        await encode(encoder, "a")
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert "e5" in caught.value.message


async def test_a_disconnect_closes_the_connection(api: RemoteApi, encoder: Model) -> None:
    api.answer = held = HeldAnswer(embeds)
    tasks = asyncio.create_task(encode(encoder, "a"))
    await held.wait(come=1)
    tasks.cancel()
    await held.wait(left=1)
    held.release()
    async with asyncio.timeout(PATIENCE_S):
        assert (await encode(encoder, "b")).tolist() == [vector_of("b")]


async def test_a_clients_time_limit(api: RemoteApi, encoder: Model) -> None:
    api.answer = HeldAnswer(embeds)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(SluiceError) as caught:
            await encode(encoder, "a", timeout_us=50_000)
    assert caught.value.code is ErrorCode.DEADLINE


async def test_tensors_that_no_encoder_has(load: Load) -> None:
    with pytest.raises(SluiceError, match="text"):
        await load('input { name: "query" data_type: TYPE_STRING dims: [1] }', endpoint="embeddings")
