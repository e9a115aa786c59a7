from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.routes.serving import RoutedServer, answering, routed_server
from tests.pipelines.remote.remote_api import RemoteApi, remote_api


@pytest.fixture
async def api() -> AsyncIterator[RemoteApi]:
    async with remote_api() as running:
        running.answer = answering("from afar")
        yield running


@pytest.fixture
async def second_api() -> AsyncIterator[RemoteApi]:
    async with remote_api() as running:
        running.answer = answering("from farther")
        yield running


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Any]:
    """Starts servers with routes, which share the test's folder."""
    async with AsyncExitStack() as stack:

        async def start_one(routes: dict[str, Any], **settings: Any) -> RoutedServer:
            return await stack.enter_async_context(routed_server(tmp_path, routes, **settings))

        yield start_one
