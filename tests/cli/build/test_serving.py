"""A built repository answers as the model that it was built from."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from sluice.bundled import models_folder
from sluice.cli.build.command import command
from tests.server_process import MODEL, running_bundled, running_server

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
DTYPE = ("--dtype", "f32")


@dataclass(frozen=True)
class Served:
    """Clients of two servers: of the built repository, and of the model that it was built from."""

    built: httpx.Client
    unbuilt: httpx.Client

    def generate(self, model: str, **fields: Any) -> dict[str, Any]:
        answer = self.built.post(f"/v2/models/{model}/generate", json={"text_input": PROMPT, **fields})
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def expected(self, **fields: Any) -> dict[str, Any]:
        answer = self.unbuilt.post(f"/v2/models/{MODEL}/generate", json={"text_input": PROMPT, **fields})
        body: dict[str, Any] = answer.json()
        return body


@pytest.fixture(scope="module", params=["none", "int8"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the bundled model as it is and with compressed weights."""
    folder = tmp_path_factory.mktemp("served")
    rill, output, cache = models_folder() / "rill", folder / "models", ("--cache-path", str(folder / "cache"))
    how = ("--quantization", request.param, *DTYPE, *cache)
    assert command([str(rill), "--output", str(output), *how]) == 0
    with ExitStack() as stack:
        unbuilt = stack.enter_context(running_server(rill, folder / "unbuilt.log", *how))
        built = stack.enter_context(running_bundled(folder / "built.log", "--model-repository", str(output), *cache))
        built.wait_ready()
        unbuilt.wait_ready()
        yield Served(stack.enter_context(built.client()), stack.enter_context(unbuilt.client()))


def test_the_model_answers_the_same(served: Served) -> None:
    fields = {"max_tokens": 24, "return_log_probs": True, "return_num_output_tokens": True}
    expected = served.expected(**fields)
    assert served.generate("rill", **fields) == {**expected, "model_name": "rill"}
    assert len(expected["text_output"]) > 20


def test_the_ensemble_answers_the_same(served: Served) -> None:
    for fields in (
        {"max_tokens": 24},
        {"max_tokens": 24, "temperature": 0.8, "top_k": 20, "seed": 7},
        {"max_tokens": 12, "repetition_penalty": 1.3, "return_num_input_tokens": True},
    ):
        expected, got = served.expected(**fields), served.generate("ensemble", **fields)
        for name in (
            "text_output",
            "finish_reason",
            *(["num_input_tokens"] if "return_num_input_tokens" in fields else []),
        ):
            assert got[name] == expected[name], fields


def test_stop_words_end_the_ensembles_text(served: Served) -> None:
    word = served.expected(max_tokens=24)["text_output"].split()[3]
    got = served.generate("ensemble", max_tokens=24, stop_words=[f" {word}"])
    assert got["finish_reason"] == "stop"
    assert len(got["text_output"].split()) <= 5


def test_the_ensemble_takes_words_with_weights(served: Served) -> None:
    got = served.generate("ensemble", max_tokens=3, embedding_bias_words="time", embedding_bias_weights=90.0)
    assert got["text_output"] == "timetimetime"


def test_the_ensemble_streams(served: Served) -> None:
    body = {"text_input": PROMPT, "max_tokens": 200, "stream": True}
    with served.built.stream("POST", "/v2/models/ensemble/generate_stream", json=body) as answer:
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]
    assert len(events) > 1  # pieces that wait for a slow reader come together
    assert "".join(event["text_output"] for event in events) == served.expected(max_tokens=200)["text_output"]


def test_chat_by_the_models_own_template(served: Served) -> None:
    texts = []
    for client, model in ((served.built, "rill"), (served.unbuilt, MODEL)):
        body = {"model": model, "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
        texts.append(client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])
    assert texts[0] == texts[1] != ""
