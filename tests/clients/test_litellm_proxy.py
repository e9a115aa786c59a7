"""litellm's proxy in front of a server: OpenAI's client gets through it what it gets from the server itself."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

KEY = "sk-proxy"
MODEL, ENCODER = "rill", "sentence_encoder"
TURNS: Any = [{"role": "user", "content": "What does len do?"}]
ANSWER = "len() returns the length (the number of items) of an object."
PATIENCE_S = 60.0
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "strict": True}}


@pytest.fixture(scope="module")
def proxied(base_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("proxy")
    models = [
        {"model_name": name, "litellm_params": {"model": f"openai/{name}", "api_base": base_url, "api_key": "unused"}}
        for name in (MODEL, ENCODER)
    ]
    (folder / "config.yaml").write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from litellm import run_server; run_server()", "--config", "config.yaml"]
    with (folder / "log").open("w") as log:
        address = ("--host", "127.0.0.1", "--port", str(port))
        process = subprocess.Popen([*command, *address], stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not _is_alive(f"http://127.0.0.1:{port}/health/liveliness"):
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0) as client:
            yield client
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _is_alive(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_chat(proxied: openai.OpenAI) -> None:
    whole = proxied.chat.completions.create(model=MODEL, messages=TURNS)
    assert whole.choices[0].message.content == ANSWER
    chunks = list(
        proxied.chat.completions.create(
            model=MODEL, messages=TURNS, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == ANSWER
    used = [chunk.usage for chunk in chunks if chunk.usage]
    assert whole.usage and [each.completion_tokens for each in used] == [whole.usage.completion_tokens]


@pytest.mark.parametrize("stream", [False, True])
def test_tools(proxied: openai.OpenAI, stream: bool) -> None:
    sent: dict[str, Any] = {"model": MODEL, "messages": TURNS, "tools": [TOOL], "tool_choice": "required"}
    sent["parallel_tool_calls"] = False
    if stream:
        with proxied.chat.completions.stream(**sent) as events:
            events.until_done()
            message: Any = events.get_final_completion().choices[0].message
    else:
        message = proxied.chat.completions.create(**sent).choices[0].message
    [call] = message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments)["a"] in (1, 2)


def test_embeddings(proxied: openai.OpenAI, base_url: str) -> None:
    texts = ["one", "two"]
    direct = openai.OpenAI(base_url=base_url).embeddings.create(model=ENCODER, input=texts)
    found = proxied.embeddings.create(model=ENCODER, input=texts)
    assert [each.embedding for each in found.data] == [each.embedding for each in direct.data]


def test_errors(proxied: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        proxied.chat.completions.create(model=MODEL, messages=TURNS, temperature=9)
