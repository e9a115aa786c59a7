"""Every test of the protocol runs on both servers, and on the event loop that the product runs on."""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator

import pytest
import uvloop

from tests.gateway.grpc import parts


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True, params=["sluice", "grpcio"])
def server_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """The server that `parts.serving` starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "server_name", request.param)
        yield request.param
