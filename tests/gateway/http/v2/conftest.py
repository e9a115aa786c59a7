from collections.abc import Iterator

import pytest

from tests.gateway.http.v2.models import all_models
from tests.gateway.http.v2.small_server import SmallServer, small_server
from tests.gateway.v2.small_service import SmallService


@pytest.fixture(scope="session")
def small() -> Iterator[SmallServer]:
    """A server with every small model; header names that begin with x-fwd- are forwarded."""
    with small_server(SmallService(*all_models()), forwarded="x-fwd-.*") as running:
        yield running
