"""Repositories built for TensorRT-LLM, served by its stand-in."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.build.command import command
from sluice.bundled import models_folder
from tests.server_process import running_bundled
from tests.stand_ins.model_folders import make_compiled_engine
from tests.stand_ins.paths import PYTHONPATH

TOKENIZER = models_folder() / "rill" / "1"
HOW = ("--tensor-parallel-size", "2", "--max-num-seqs", "8", "--max-model-len", "512", "--kv-cache-dtype", "fp8")


Serve = Callable[[Path, str], httpx.Client]


def recorded_arguments(record: Path) -> dict[str, Any]:
    """Return the arguments that the stand-in's LLM got."""
    arguments: dict[str, Any] = json.loads(record.read_text().splitlines()[0])["arguments"]
    return arguments


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Return a function that serves a repository by a version of the stand-in."""
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
        answer = client.post(f"/v2/models/{model}/generate", json={"text_input": "Once upon", "max_tokens": 12})
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["text_output"])
    return texts


def test_a_checkpoint_with_its_options(serve: Serve, tmp_path: Path) -> None:
    output = tmp_path / "models"
    assert command([str(TOKENIZER), "--output", str(output), "--runtime", "tensorrt_llm", *HOW]) == 0
    by_model, by_ensemble = answers(serve(output, "1.3.0"), "rill", "ensemble")
    assert by_model == by_ensemble != ""
    recorded = recorded_arguments(tmp_path / "record")
    assert (recorded["model"], recorded["tensor_parallel_size"]) == (str(output / "rill" / "1"), 2)
    assert (recorded["max_batch_size"], recorded["max_seq_len"]) == (8, 512)
    assert recorded["kv_cache_config"]["dtype"] == "fp8"


def test_a_compiled_engine(serve: Serve, tmp_path: Path) -> None:
    engine, output = make_compiled_engine(tmp_path / "engine"), tmp_path / "models"
    assert command([str(engine), "--output", str(output), "--tokenizer", str(TOKENIZER)]) == 0
    by_model, by_ensemble = answers(serve(output, "1.2.1"), "engine", "ensemble")
    assert by_model == by_ensemble != ""
    assert recorded_arguments(tmp_path / "record")["model"] == str(output / "engine" / "1")
