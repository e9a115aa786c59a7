"""Embeddings of a causal language model on the vLLM runtime: the vectors of our own executor."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from tests.pipelines.encoding.test_llm_encoder import write_sentence_files
from tests.server_process import ServerProcess, running_command
from tests.vllm.conftest import PATIENCE_S, RILL, arguments, metric

pytestmark = pytest.mark.vllm
TEXTS = ["one", "A block table maps blocks.", "word " * 150, "Blocks of a finished request are kept."]
LONG = [1] * 3000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "embedder"
    shutil.copytree(RILL, folder)
    write_sentence_files(folder, "mean", matryoshka_dimensions=[64, 128])
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "Find: "}}))
    return folder


@pytest.fixture(scope="module")
def embedder(vllm_python: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    # The hidden states of a text are averaged, which vLLM does in one step: that of 64 tokens is made larger.
    small = ("--max-num-batched-tokens=64", "--max-num-seqs=16")
    with running_command(
        tmp_path_factory.mktemp("log") / "embedder", *arguments(vllm_python, checkpoint), *small
    ) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def ours(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The same model on our own executor."""
    with running_command(tmp_path_factory.mktemp("log") / "ours", str(checkpoint), "--dtype=f32") as server:
        server.wait_ready()
        yield server


def embed(server: ServerProcess, given: Any, **fields: Any) -> NDArray[np.float64]:
    dimensions = fields.pop("dimensions", openai.omit)
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", timeout=PATIENCE_S) as client:
        found = client.embeddings.create(model="embedder", input=given, dimensions=dimensions, extra_body=fields)
    return np.array([each.embedding for each in found.data])


@pytest.mark.parametrize(
    "fields", [{}, {"dimensions": 64}, {"input_type": "query"}, {"truncate_prompt_tokens": 9}], ids=str
)
def test_vectors_are_our_executors(embedder: ServerProcess, ours: ServerProcess, fields: dict[str, Any]) -> None:
    found, expected = (embed(server, TEXTS, **fields) for server in (embedder, ours))
    assert np.abs(found - expected).max() < 1e-4
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-5


def test_many_texts_at_once_are_as_alone(embedder: ServerProcess) -> None:
    many = [f"{text} {number}" for number in range(30) for text in TEXTS]
    with ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(lambda _: embed(embedder, many), range(4))]
    alone = np.concatenate([embed(embedder, text) for text in many[:4]])
    for answer in answers:
        assert np.abs(answer[:4] - alone).max() < 1e-5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": LONG}, "more tokens than the 1024 that the model takes"),
        ({"input": [[1, 99999]]}, "must be a token id from 0 to 4095, got 99999"),
        ({"input": "x", "dimensions": 65}, "dimensions must be among 64, 128, 320"),
        ({"input": "x", "truncate_prompt_tokens": 5000}, "at most 1024"),
    ],
)
def test_a_bad_request_is_refused(embedder: ServerProcess, fields: dict[str, Any], words: str) -> None:
    response = httpx.post(f"{embedder.base_url}/v1/embeddings", json={"model": "embedder", **fields}, timeout=60)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_the_longest_text_fits(embedder: ServerProcess) -> None:
    assert embed(embedder, LONG[:1024]).shape == embed(embedder, LONG, truncate_prompt_tokens=-1).shape == (1, 320)


def test_a_client_that_leaves_ends_its_requests(embedder: ServerProcess) -> None:
    body = {"model": "embedder", "input": [LONG[:1000]] * 500}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{embedder.base_url}/v1/embeddings", json=body, timeout=httpx.Timeout(60, read=0.5))
    while metric(embedder, "sluice_sequences_running") + metric(embedder, "sluice_sequences_waiting") > 0:
        assert embedder.process.poll() is None
    assert metric(embedder, "sluice_kv_blocks_reserved") == 0


def test_texts_are_embedded_when_the_engine_is_killed(embedder: ServerProcess) -> None:
    undisturbed = embed(embedder, TEXTS)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(embed, embedder, TEXTS * 30) for _ in range(2)]
        while metric(embedder, "sluice_sequences_running") == 0:
            assert not any(each.done() for each in answers)
        embedder.engine().kill()
        for each in answers:
            assert np.abs(each.result()[:4] - undisturbed).max() < 1e-5
