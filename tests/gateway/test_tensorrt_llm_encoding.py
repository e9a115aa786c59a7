"""Vectors and scores of TensorRT-LLM: `LLM.encode` of the stand-in, behind the server that serves the real one."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.config import EngineConfig, Runtime
from tests.gateway.answering import Answering, answering
from tests.pipelines.encoding.test_llm_encoder import write_sentence_files
from tests.stand_ins.engines import fork_engines
from tests.stand_ins.model_folders import MAX_POSITIONS, make_checkpoint
from tests.stand_ins.paths import PYTHONPATH
from tests.stand_ins.tensorrt_llm._stand_in.encoder import echo_vector

SIZE = 64
MODULE = "sluice.engine.delegated.tensorrt_llm.process"
FAULTY = 4000
"""The token of which a forward pass fails."""
ROWS = [[number, 7, 9] for number in range(1, 60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def serving(folder: Path, checkpoint: Path, fault: str) -> Iterator[Answering]:
    config = EngineConfig(
        model_path=str(checkpoint), tokenizer_path=str(checkpoint), runtime=Runtime.TENSORRT_LLM, max_num_seqs=8,
        max_num_batched_tokens=64,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        fork_engines(patch)
        patch.setenv("PYTHONPATH", PYTHONPATH)
        settings = {"VERSION": "1.4.0", "FAULT": fault, "FAULT_ONCE": str(folder / "fault")}
        for name, value in {**settings, "RECORD": str(folder / f"{checkpoint.name}.record")}.items():
            patch.setenv(f"STAND_IN_{name}", value)
        with answering(lambda: ProcessEngineClient(config, module=MODULE), checkpoint) as running:
            yield running


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Iterator[Answering]:
    checkpoint = make_checkpoint(
        folder / "embedder", with_tokenizer=True, architectures=["Qwen3ForCausalLM"], hidden_size=SIZE
    )
    write_sentence_files(checkpoint, "lasttoken")
    (folder / "fault").touch()
    yield from serving(folder, checkpoint, f"error_on_token={FAULTY},cuda_error")


def embed(server: Answering, given: Any) -> NDArray[np.float64]:
    with openai.OpenAI(base_url=f"{server.client.base_url}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model="rill", input=given)
    return np.array([each.embedding for each in found.data])


def expected(rows: list[list[int]]) -> NDArray[np.float64]:
    vectors = np.array([echo_vector(row, [0] * len(row), SIZE) for row in rows], np.float64)
    scaled: NDArray[np.float64] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return scaled


def batches(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / f"{name}.record").read_text().splitlines()]
    return [line for line in lines if "encoded" in line]


def test_crowds_get_the_models_vectors_in_batches_of_the_limits(embedder: Answering, folder: Path) -> None:
    before = len(batches(folder, "embedder"))
    with ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(lambda _: embed(embedder, ROWS), range(4))]
    for answer in answers:
        assert np.abs(answer - expected(ROWS)).max() < 1e-6
    made = [each["encoded"] for each in batches(folder, "embedder")[before:]]
    assert sorted(row for batch in made for row in batch) == sorted(ROWS * 4)
    assert {len(batch) for batch in made} <= set(range(1, 9)) and max(map(len, made)) == 8


def test_texts_are_tokenized_and_the_longest_fits_a_step(embedder: Answering) -> None:
    assert embed(embedder, ["one text", "another"]).shape == (2, SIZE)
    assert np.abs(embed(embedder, [[5] * MAX_POSITIONS]) - expected([[5] * MAX_POSITIONS])).max() < 1e-6
    with pytest.raises(openai.BadRequestError, match=f"more tokens than the {MAX_POSITIONS} that the model takes"):
        embed(embedder, [[5] * (MAX_POSITIONS + 1)])


def test_a_text_that_fails_does_not_fail_its_batch(embedder: Answering) -> None:
    with ThreadPoolExecutor(4) as pool:
        bad, *good = pool.map(lambda rows: _outcome(embedder, rows), [[[1, FAULTY]], *([row] for row in ROWS[:6])])
    assert bad == "500"
    assert good == ["200"] * 6


def _outcome(server: Answering, rows: list[list[int]]) -> str:
    return str(server.client.post("/v1/embeddings", json={"model": "rill", "input": rows}).status_code)


def test_texts_are_encoded_though_the_gpu_is_lost(embedder: Answering, folder: Path) -> None:
    (folder / "fault").unlink()
    assert np.abs(embed(embedder, ROWS[:20]) - expected(ROWS[:20])).max() < 1e-6
    assert (folder / "fault").exists()


def test_an_embedder_gives_no_text(embedder: Answering) -> None:
    answer = embedder.client.post("/v1/completions", json={"model": "rill", "prompt": "x"})
    assert answer.status_code == 400
    assert "gives embeddings and no text; POST /v1/embeddings" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def scorer(folder: Path) -> Iterator[Answering]:
    checkpoint = make_checkpoint(
        folder / "scorer", with_tokenizer=True, architectures=["BertForSequenceClassification"], num_labels=1,
        type_vocab_size=2,
    )  # fmt: skip
    yield from serving(folder, checkpoint, "")


def test_scores_are_sigmoids_of_the_logits_of_pairs(scorer: Answering, folder: Path) -> None:
    body = {"model": "rill", "text_1": "Where is the sea?", "text_2": ["In the south.", "Blocks are kept."]}
    answer: httpx.Response = scorer.client.post("/v1/score", json=body)
    assert answer.status_code == 200, answer.text
    told: dict[float, list[int]] = {}
    for batch in batches(folder, "scorer"):
        types = batch["token_type_ids"]
        for row in batch["encoded"]:
            own, types = types[: len(row)], types[len(row) :]
            told[1 / (1 + np.exp(-float(echo_vector(row, own, 1)[0])))] = own
    for each in answer.json()["data"]:
        nearest = min(told, key=lambda score: abs(score - each["score"]))
        assert nearest == pytest.approx(each["score"], abs=1e-6)
        assert {0, 1} == set(told[nearest]), "the second text has a type of its own"
