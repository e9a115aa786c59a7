"""Images on the vLLM runtime, with a model of text and images that is made here."""

import base64
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from tests.server_process import ServerProcess, running_command
from tests.vllm.conftest import PATIENCE_S, RILL, metric

pytestmark = pytest.mark.vllm
SIZES = ((50, 40), (20, 70), (30, 30), (9, 200))
"""The larger an image, the more tokens it has."""
TEXT, MAX_TOKENS = "What is this?", 24
NUM_BLOCKS = 24


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(1)
    for number, (width, height) in enumerate(SIZES):
        pixels = random.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def model(
    vllm_python: str, pictures: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    """The checkpoint, and what transformers generates: the prompt's length, and the token ids."""
    folder = tmp_path_factory.mktemp("seeing") / "seeing"
    jobs = [{"image": str(each), "text": TEXT, "max_tokens": MAX_TOKENS} for each in pictures]
    command = [vllm_python, str(Path(__file__).with_name("seeing_model.py")), str(RILL), str(folder)]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def server(
    vllm_python: str, model: tuple[Path, list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """The model with a cache that is too small for all requests at once."""
    settings = ("enforce_eager=true", "block_size=32")
    command = [str(model[0]), "--runtime=vllm", f"--engine-python={vllm_python}", "--dtype=f32", "--max-model-len=256"]
    command += [f"--num-blocks={NUM_BLOCKS}", *(f"--runtime-setting={each}" for each in settings)]
    with running_command(tmp_path_factory.mktemp("log") / "seeing", *command) as server:
        server.wait_ready()
        yield server


def part(picture: Path) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def ask(server: ServerProcess, *parts: dict[str, Any] | str, **fields: Any) -> Any:
    content = [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]
    extra = {"ignore_eos": True, "return_token_ids": True}
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", timeout=PATIENCE_S) as client:
        request: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0, "extra_body": extra, **fields}
        messages: list[Any] = [{"role": "user", "content": content}]
        answer = client.chat.completions.create(model="seeing", messages=messages, **request)
        return list(answer) if fields.get("stream") else answer


def test_tokens_are_those_of_transformers(
    server: ServerProcess, model: tuple[Path, list[list[int]]], pictures: list[Path]
) -> None:
    with ThreadPoolExecutor(len(pictures)) as pool:
        for _ in range(2):  # the second time from vLLM's caches
            answers = [*pool.map(lambda each: ask(server, part(each), TEXT), pictures)]
            found = [[each.usage.prompt_tokens, *each.choices[0].token_ids] for each in answers]
            assert found == model[1]
    assert len({tuple(each) for each in found}) == len(pictures)
    assert len({each[0] for each in found}) > 1


def test_what_is_streamed_equals_what_is_not(server: ServerProcess, pictures: list[Path]) -> None:
    parts = ("Compare", part(pictures[0]), "<image> and", part(pictures[1]))  # a text is no placeholder
    whole = ask(server, *parts)
    chunks = ask(server, *parts, stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert whole.choices[0].message.content != ask(server, *parts[::-1]).choices[0].message.content


def test_the_prefix_cache_tells_images_apart(server: ServerProcess, pictures: list[Path]) -> None:
    long = "x y z " * 15
    answers = [ask(server, long, part(pictures[each]), long) for each in (0, 2, 0)]
    first, other, again = (each.usage.prompt_tokens_details.cached_tokens for each in answers)
    assert 0 == first < other < again
    assert answers[2].choices[0].token_ids == answers[0].choices[0].token_ids


def test_nothing_is_preempted(server: ServerProcess, pictures: list[Path]) -> None:
    def length(number: int) -> int:
        tokens = ask(server, part(pictures[number % 4]), f"Story {number}:", max_tokens=100).choices[0].token_ids
        return len(tokens)

    with ThreadPoolExecutor(12) as pool:
        assert [*pool.map(length, range(12))] == [100] * 12
    assert metric(server, "sluice_engine_preemptions_total") == 0


def test_the_context_counts_images(
    server: ServerProcess, model: tuple[Path, list[list[int]]], pictures: list[Path]
) -> None:
    room = 256 - model[1][0][0]
    whole = ask(server, part(pictures[0]), TEXT, max_tokens=None)
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (room, "length")
    with pytest.raises(openai.BadRequestError, match=f"max_tokens may be at most {room}"):
        ask(server, part(pictures[0]), TEXT, max_tokens=room + 1)


@pytest.mark.parametrize(
    ("parts", "fields", "words"),
    [
        (("gif",), {}, r"messages\[0\]\.content\[0\]\.image_url must be an image in PNG"),
        (("0", "1", "2"), {"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs must be left out"),
        (
            ("0", TEXT),
            {"extra_body": {"truncate_prompt_tokens": 3}},
            "must have a placeholder for each of its 1 images",
        ),
        (("0",) * 65, {}, "one image too many: a prompt of model 'seeing' has at most 64"),
    ],
)
def test_refused(
    server: ServerProcess, pictures: list[Path], parts: tuple[str, ...], fields: dict[str, Any], words: str
) -> None:
    bad = {"type": "image_url", "image_url": {"url": "data:image/gif;base64,aGk="}}
    sent = [bad if each == "gif" else part(pictures[int(each)]) if each.isdigit() else each for each in parts]
    with pytest.raises(openai.BadRequestError, match=words):
        ask(server, *sent, **fields)
    assert len(ask(server, "Hello", max_tokens=3).choices[0].token_ids) == 3


def test_other_protocols_take_images(server: ServerProcess, pictures: list[Path]) -> None:
    image = base64.b64encode(pictures[0].read_bytes()).decode()
    url, question = f"data:image/png;base64,{image}", {"role": "user", "content": TEXT}
    expected = ask(server, part(pictures[0]), TEXT, max_tokens=8, extra_body={}).choices[0].message.content
    options = {"stream": False, "options": {"temperature": 0, "num_predict": 8}}
    input_parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": TEXT}]
    source = {"type": "base64", "media_type": "image/png", "data": image}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": TEXT}]
    sent: list[tuple[str, dict[str, Any], tuple[str | int, ...]]] = [
        ("/api/chat", {**options, "messages": [{**question, "images": [image]}]}, ("message", "content")),
        ("/api/generate", {**options, "prompt": TEXT, "images": [image]}, ("response",)),
        (
            "/v1/responses",
            {"max_output_tokens": 8, "temperature": 0, "input": [{"role": "user", "content": input_parts}]},
            ("output", 0, "content", 0, "text"),
        ),
        (
            "/v1/messages",
            {"max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": blocks}]},
            ("content", 0, "text"),
        ),
    ]
    for path, body, place in sent:
        found = httpx.post(f"{server.base_url}{path}", json={"model": "seeing", **body}, timeout=60).json()
        for step in place:
            found = found[step]
        assert found == expected, path
    first = httpx.post(f"{server.base_url}/v1/responses", json={"model": "seeing", **sent[2][1]}, timeout=60).json()
    body = {"model": "seeing", "previous_response_id": first["id"], "input": "And?", "max_output_tokens": 8}
    second = httpx.post(f"{server.base_url}/v1/responses", json=body, timeout=60).json()
    assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
    show = httpx.post(f"{server.base_url}/api/show", json={"model": "seeing"}, timeout=60).json()
    assert "vision" in show["capabilities"]
