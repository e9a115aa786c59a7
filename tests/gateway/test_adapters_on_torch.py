"""LoRA adapters over a running server on torch, asked by OpenAI's client, beside one on OpenVINO."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.engine.runners.test_adapters import make_adapter
from tests.server_process import MODEL, ServerProcess, running_server
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.torch
NAMES = (MODEL, f"{MODEL}:one", f"{MODEL}:two")
PROMPT = "Once upon a time there was a river."
NUM_TOKENS = 24

Texts = dict[str, str]


@pytest.fixture(scope="module")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options for two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    folders = {
        name: make_adapter(checkpoint, folder / name, seed, scale=3.0) for seed, name in enumerate(("one", "two"))
    }
    return [f"--lora-modules={name}={path}" for name, path in folders.items()]


@pytest.fixture(scope="module")
def server(checkpoint: Path, adapters: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(checkpoint, log, "--runtime=torch", "--device=cpu", "--dtype=f32", *adapters) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def expected(checkpoint: Path, adapters: list[str], tmp_path_factory: pytest.TempPathFactory) -> Texts:
    """The texts of OpenVINO, each asked for alone."""
    log = tmp_path_factory.mktemp("openvino") / "log"
    with running_server(checkpoint, log, "--runtime=openvino", "--dtype=f32", *adapters) as running:
        running.wait_ready()
        return {name: asyncio.run(answer(running, name)) for name in NAMES}


def connect(server: ServerProcess) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="-", timeout=PATIENCE_S, max_retries=0)


async def answer(server: ServerProcess, name: str) -> str:
    async with connect(server) as client:
        completion = await client.completions.create(
            model=name, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, extra_body={"ignore_eos": True}
        )
        assert completion.model == name
        return completion.choices[0].text


async def stream(server: ServerProcess, name: str) -> str:
    async with connect(server) as client:
        chunks = await client.completions.create(
            model=name, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        return "".join([chunk.choices[0].text async for chunk in chunks])


def test_each_adapter_says_something_else(expected: Texts) -> None:
    assert len({*expected.values()}) == len(NAMES)


async def test_the_models_are_listed(server: ServerProcess) -> None:
    async with connect(server) as client:
        assert [model.id async for model in client.models.list()] == [*NAMES]


@pytest.mark.parametrize("name", NAMES)
async def test_an_answer_is_openvino_s(server: ServerProcess, expected: Texts, name: str) -> None:
    assert await answer(server, name) == expected[name]


@pytest.mark.parametrize("name", NAMES)
async def test_a_stream_is_openvino_s(server: ServerProcess, expected: Texts, name: str) -> None:
    assert await stream(server, name) == expected[name]


async def test_requests_of_all_adapters_at_once_are_openvino_s(server: ServerProcess, expected: Texts) -> None:
    asked = [name for name in NAMES for _ in range(3)]
    assert await asyncio.gather(*(stream(server, name) for name in asked)) == [expected[name] for name in asked]
