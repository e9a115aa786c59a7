"""Repositories built for TensorRT-LLM, served by its stand-in."""

import json
from pathlib import Path
from typing import Any

from sluice.bundled import models_folder
from sluice.cli.build.command import command
from tests.gateway.serving_here import serving_here
from tests.stand_ins.model_folders import make_compiled_engine

TOKENIZER = models_folder() / "rill" / "1"
HOW = ("--tensor-parallel-size", "2", "--max-num-seqs", "8", "--max-model-len", "512", "--kv-cache-dtype", "fp8")


def recorded_arguments(record: Path) -> dict[str, Any]:
    """Return the arguments that the stand-in's LLM got."""
    arguments: dict[str, Any] = json.loads(record.read_text().splitlines()[0])["arguments"]
    return arguments


def answers(folder: Path, version: str, *models: str) -> list[str]:
    """Serve the repository in the folder by a version of the stand-in."""
    arguments = ["--model-repository", str(folder / "models"), "--exit-on-error", "true"]
    texts = []
    with serving_here(*arguments, VERSION=version, RECORD=str(folder / "record")) as server, server.client() as client:
        for model in models:
            answer = client.post(f"/v2/models/{model}/generate", json={"text_input": "Once upon", "max_tokens": 12})
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["text_output"])
    return texts


def test_a_checkpoint_with_its_options(tmp_path: Path) -> None:
    output = tmp_path / "models"
    assert command([str(TOKENIZER), "--output", str(output), "--runtime", "tensorrt_llm", *HOW]) == 0
    by_model, by_ensemble = answers(tmp_path, "1.3.0", "rill", "ensemble")
    assert by_model == by_ensemble != ""
    recorded = recorded_arguments(tmp_path / "record")
    assert (recorded["model"], recorded["tensor_parallel_size"]) == (str(output / "rill" / "1"), 2)
    assert (recorded["max_batch_size"], recorded["max_seq_len"]) == (8, 512)
    assert recorded["kv_cache_config"]["dtype"] == "fp8"


def test_a_compiled_engine(tmp_path: Path) -> None:
    engine, output = make_compiled_engine(tmp_path / "engine"), tmp_path / "models"
    assert command([str(engine), "--output", str(output), "--tokenizer", str(TOKENIZER)]) == 0
    by_model, by_ensemble = answers(tmp_path, "1.2.1", "engine", "ensemble")
    assert by_model == by_ensemble != ""
    assert recorded_arguments(tmp_path / "record")["model"] == str(output / "engine" / "1")
