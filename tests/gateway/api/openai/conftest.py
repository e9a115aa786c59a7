from collections.abc import Iterator

import openai
import pytest

from tests.gateway.front.http.live import LiveServer
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="session")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    """The stock client without retries, so that a test sees the first answer."""
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as stock:
        yield stock
