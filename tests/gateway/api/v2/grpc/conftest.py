"""Tests of the protocol run on the event loop that the product runs on, and on Sluice's own server or on both."""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator

import pytest
import uvloop

from tests.gateway.api.v2.grpc import parts


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def server_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """The server that `parts.serving` starts: `parts.on_both_servers` names each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "server_name", getattr(request, "param", "sluice"))
        yield parts.server_name
