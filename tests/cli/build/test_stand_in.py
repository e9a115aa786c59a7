"""Repositories that were built for TensorRT-LLM, on its stand-in."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.build.command import command
from gateway.bundled import models_folder
from tests.server_process import running_bundled
from tests.stand_ins.model_folders import make_compiled_engine
from tests.stand_ins.paths import PYTHONPATH

TOKENIZER = models_folder() / "rill" / "1"
HOW = ("--tensor-parallel-size", "2", "--max-num-seqs", "8", "--max-model-len", "512", "--kv-cache-dtype", "fp8")


Serve = Callable[[Path, str], httpx.Client]


def made_with(record: Path) -> dict[str, Any]:
    """The arguments of the LLM."""
    arguments: dict[str, Any] = json.loads(record.read_text().splitlines()[0])["arguments"]
    return arguments


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Serves a repository by a version of the stand-in."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("STAND_IN_RECORD", str(tmp_path / "record"))
    with ExitStack() as stack:

        def start(repository: Path, version: str) -> httpx.Client:
            monkeypatch.setenv("STAND_IN_VERSION", version)
            server = stack.enter_context(
                running_bundled(tmp_path / "log", "--model-repository", str(repository), "--exit-on-error", "true")
            )
            server.wait_ready()
            return stack.enter_context(server.client())

        yield start


def answers(client: httpx.Client, *models: str) -> list[str]:
    texts = []
    for model in models:
        answered = client.post(f"/v2/models/{model}/generate", json={"text_input": "Once upon", "max_tokens": 12})
        assert answered.status_code == 200, answered.text
        texts.append(answered.json()["text_output"])
    return texts


def test_a_checkpoint_with_its_options(serve: Serve, tmp_path: Path) -> None:
    output = tmp_path / "models"
    assert command([str(TOKENIZER), "--output", str(output), "--runtime", "tensorrt_llm", *HOW]) == 0
    by_model, by_ensemble = answers(serve(output, "1.3.0"), "rill", "ensemble")
    assert by_model == by_ensemble != ""
    told = made_with(tmp_path / "record")
    assert (told["model"], told["tensor_parallel_size"]) == (str(output / "rill" / "1"), 2)
    assert (told["max_batch_size"], told["max_seq_len"], told["kv_cache_config"]["dtype"]) == (8, 512, "fp8")


def test_a_compiled_engine(serve: Serve, tmp_path: Path) -> None:
    engine, output = make_compiled_engine(tmp_path / "engine"), tmp_path / "models"
    assert command([str(engine), "--output", str(output), "--tokenizer", str(TOKENIZER)]) == 0
    by_model, by_ensemble = answers(serve(output, "1.2.1"), "engine", "ensemble")
    assert by_model == by_ensemble != ""
    assert made_with(tmp_path / "record")["model"] == str(output / "engine" / "1")
