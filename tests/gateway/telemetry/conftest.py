from collections.abc import Iterator

import pytest

from tests.gateway.front.http.live import LiveServer, live_server


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running
