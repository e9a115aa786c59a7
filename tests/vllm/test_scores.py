"""Scores of a cross-encoder on the vLLM runtime: those of transformers."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.paths import MODELS
from tests.server_process import ServerProcess, running_command
from tests.vllm.conftest import PATIENCE_S, arguments, metric

pytestmark = pytest.mark.vllm
QUESTION = "How long does delivery take?"
DOCUMENTS = ["The cat is on the mat.", "Shipping takes five business days.", "", "word " * 300]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "cross"
    folder.mkdir()
    shutil.copy(MODELS / "sentence_tokenizer" / "1" / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@pytest.fixture(scope="module")
def expected(vllm_python: str, checkpoint: Path) -> list[float]:
    script = Path(__file__).with_name("cross_encoder.py")
    pairs = json.dumps([[QUESTION, document] for document in DOCUMENTS])
    done = subprocess.run(
        [vllm_python, str(script), str(checkpoint)], input=pairs, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    scores: list[float] = json.loads(done.stdout.splitlines()[-1])
    return scores


@pytest.fixture(scope="module")
def scorer(
    vllm_python: str, checkpoint: Path, expected: list[float], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    with running_command(tmp_path_factory.mktemp("log") / "scorer", *arguments(vllm_python, checkpoint)) as server:
        server.wait_ready()
        yield server


def post(server: ServerProcess, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{server.base_url}{path}", json={"model": "cross", **body}, timeout=PATIENCE_S)
    return answer.json() | {"status": answer.status_code}


def test_scores_are_transformers_whole_and_cut(scorer: ServerProcess, expected: list[float]) -> None:
    found = post(scorer, "/v1/score", text_1=QUESTION, text_2=DOCUMENTS)
    assert [each["score"] for each in found["data"]] == pytest.approx(expected, abs=1e-4)
    assert found["usage"]["total_tokens"] > 128
    ranked = post(scorer, "/v1/rerank", query=QUESTION, documents=DOCUMENTS, top_n=3)["results"]
    order = sorted(range(len(expected)), key=lambda index: -expected[index])
    assert [each["index"] for each in ranked] == order[:3]


def test_many_pairs_at_once_score_as_alone(scorer: ServerProcess) -> None:
    many = [f"{document} {number}" for number in range(40) for document in DOCUMENTS[:3]]
    with ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(lambda _: post(scorer, "/v1/score", text_1=QUESTION, text_2=many), range(4))]
    alone = [post(scorer, "/v1/score", text_1=QUESTION, text_2=each)["data"][0]["score"] for each in many[:6]]
    for answer in answers:
        assert [each["score"] for each in answer["data"][:6]] == pytest.approx(alone, abs=1e-5)
    assert metric(scorer, "sluice_sequences_running") == metric(scorer, "sluice_sequences_waiting") == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_a_scorer_gives_nothing_else(scorer: ServerProcess, path: str) -> None:
    answer = post(scorer, path, prompt="x", input="x")
    assert answer["status"] == 400
    assert ("POST /v1/score" if path == "/v1/completions" else "has no embeddings") in answer["error"]["message"]
    with httpx.Client(base_url=scorer.base_url) as client:
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["cross"]
