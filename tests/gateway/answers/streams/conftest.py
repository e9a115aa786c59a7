from collections.abc import Iterator

import pytest

from sluice.engine.config import EngineConfig
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.streams import ResumeOptions
from tests.gateway.front.http.live import LiveServer, live_server
from tests.paths import RILL_TOKENIZER
from tests.pipelines.chat.chat_folder import HERMES_TEMPLATE, THINKING, write_chat_folder


@pytest.fixture(scope="session")
def kept_live() -> Iterator[LiveServer]:
    """A server that keeps streams, and 64 KiB of each."""
    with live_server(ServeConfig(streams=ResumeOptions(resume_s=20.0, max_stream_bytes=64 << 10))) as running:
        yield running


@pytest.fixture(scope="session")
def brief_live() -> Iterator[LiveServer]:
    """A server that keeps streams for a moment."""
    with live_server(ServeConfig(streams=ResumeOptions(resume_s=0.2))) as running:
        yield running


@pytest.fixture(scope="session")
def kept_chat_live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One whose model calls tools: it writes the runner's script."""
    folder = write_chat_folder(RILL_TOKENIZER, tmp_path_factory.mktemp("chat") / "1", HERMES_TEMPLATE + THINKING)
    engine = EngineConfig(model_path=str(folder))
    config = ServeConfig(streams=ResumeOptions(resume_s=20.0))
    with live_server(config, engine_config=engine, checkpoint=folder) as running:
        yield running
