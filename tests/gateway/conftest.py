from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from sluice.engine.client.base import EngineClient
from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.config import EngineConfig, Runtime
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.http import HttpOptions, RequestOptions
from sluice.gateway.options.responses import ResponsesOptions
from tests.gateway.front.http.live import LiveServer, live_server
from tests.gateway.tiny_checkpoint import write_tiny_checkpoint
from tests.paths import RILL_TOKENIZER, VLLM_PYTHON
from tests.pipelines.chat.chat_folder import HERMES_TEMPLATE, THINKING, write_chat_folder


@pytest.fixture(scope="session")
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server over a stand-in that echoes, with `--on-vllm` and `--on-torch` over a model with random
    weights on vLLM or torch."""
    responses = ResponsesOptions(store=str(tmp_path_factory.mktemp("responses") / "responses.sqlite"))
    engine = None
    if request.config.getoption("on_vllm"):
        engine = partial(engine_on_vllm, write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "1", head_dim=32))
    elif request.config.getoption("on_torch"):
        engine = partial(engine_on_torch, write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "1", head_dim=32))
    with live_server(ServeConfig(responses=responses), given_engine=engine) as running:
        yield running


def engine_on_vllm(checkpoint: Path) -> EngineClient:
    """Return an engine with the stand-in's sizes."""
    return ProcessEngineClient(
        EngineConfig(
            model_path=str(checkpoint),
            max_model_len=1024,
            num_blocks=256,
            runtime=Runtime.VLLM,
            engine_python=str(VLLM_PYTHON),
            dtype="f32",
            # Compiling would take a minute.
            runtime_settings={"enforce_eager": "true", "block_size": "32"},
        )
    )


def engine_on_torch(checkpoint: Path) -> EngineClient:
    """Return an engine with the stand-in's sizes, on the CPU."""
    return ProcessEngineClient(
        EngineConfig(
            model_path=str(checkpoint),
            max_model_len=1024,
            num_blocks=256,
            runtime=Runtime.TORCH,
            device="cpu",
            dtype="f32",
            num_threads=1,
        )
    )


@pytest.fixture(scope="session")
def strict_live() -> Iterator[LiveServer]:
    """A server that refuses unknown fields and bodies over 4096 bytes, takes chat templates, and breaks silences of
    50 ms."""
    options = HttpOptions(is_strict=True, max_input_bytes=4096, sse_keep_alive_s=0.05)
    with live_server(ServeConfig(http=options, requests=RequestOptions(trusts_templates=True))) as running:
        yield running


@pytest.fixture(scope="session")
def loading_live() -> Iterator[LiveServer]:
    """A server that listens while its model is loading."""
    with live_server(is_loaded=False) as running:
        yield running


@pytest.fixture(scope="session")
def chat_live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose model reasons and calls tools: it writes the runner's script, or random tokens."""
    folder = write_chat_folder(RILL_TOKENIZER, tmp_path_factory.mktemp("chat") / "1", HERMES_TEMPLATE + THINKING)
    engine = EngineConfig(model_path=str(folder))
    with live_server(engine_config=engine, checkpoint=folder) as running:
        running.runner.script = []
        yield running


@pytest.fixture
def random_answers(chat_live: LiveServer) -> Iterator[None]:
    """Have `chat_live` write random tokens again after the test."""
    yield
    chat_live.runner.script = []
