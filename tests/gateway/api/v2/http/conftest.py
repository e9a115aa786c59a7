from collections.abc import Iterator

import pytest

from tests.gateway.api.v2.http.models import all_models
from tests.gateway.api.v2.http.small_server import SmallServer, small_server
from tests.gateway.api.v2.small_service import SmallService


@pytest.fixture(scope="session", params=["direct", "by the application"])
def small(request: pytest.FixtureRequest) -> Iterator[SmallServer]:
    """A server with every small model, with and without direct answers; names that begin with x-fwd- are forwarded."""
    is_direct = request.param == "direct"
    with small_server(SmallService(*all_models()), forwarded="x-fwd-.*", is_direct=is_direct) as running:
        yield running
