"""A server of calls without a service: handlers of raw messages, whose doings a test sees."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc

from sluice.gateway.api.v2.grpc.http2_server import CallServer
from sluice.gateway.api.v2.grpc.methods import Methods
from sluice.gateway.calls import CallLog
from sluice.gateway.front.restrictions import Restrictions
from sluice.gateway.options.grpc import GrpcOptions
from tests.waiting import PATIENCE_S, until

ECHO, LARGE, HELD, DEAF, STREAM = "/test/Echo", "/test/Large", "/test/Held", "/test/Deaf", "/test/Stream"


class Calls:
    """A server on a free port. `let_go` ends the calls of HELD and DEAF."""

    def __init__(self, options: GrpcOptions, more: Mapping[str, Any]) -> None:
        self.let_go = asyncio.Event()
        self.num_begun = self.num_held = self.num_cancelled = 0
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        handlers = {
            ECHO: unary(_echo),
            LARGE: unary(_answer_at_length),
            HELD: unary(self._hold),
            DEAF: stream(self._ignore),
            STREAM: stream(_echo_each),
            **more,
        }
        self.server = CallServer(Methods(handlers, {}, CallLog(), Restrictions(())), options, "127.0.0.1")
        self.port = 0

    async def _hold(self, raw: bytes, context: Any) -> bytes:
        await self._wait()
        return bytes(raw)

    async def _ignore(self, requests: Any, context: Any) -> None:
        await self._wait()

    async def _wait(self) -> None:
        self.num_begun += 1
        self.num_held += 1
        try:
            await self.let_go.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_held -= 1

    @property
    def num_streams(self) -> int:
        return sum(len(each.streams) for each in self.server.connections)

    async def until_idle(self) -> None:
        """Wait until no handler runs and no connection has a stream or counts a call."""
        await until(
            lambda: (
                not (
                    self.server.calls.tasks
                    or self.num_streams
                    or any(each.num_running for each in self.server.connections)
                )
            )
        )


async def _echo(raw: bytes | memoryview, context: Any) -> bytes:
    return bytes(raw)


async def _answer_at_length(raw: bytes, context: Any) -> bytes:
    """Answer with as many bytes as the message says, with none to what is no number."""
    return bytes(int(raw) if raw.isdigit() else 0)


async def _echo_each(requests: Any, context: Any) -> None:
    while (raw := await context.read()) is not grpc.aio.EOF:
        await context.write(bytes(raw))


@asynccontextmanager
async def serving_calls(
    options: GrpcOptions | None = None, more: Mapping[str, Any] | None = None
) -> AsyncIterator[Calls]:
    """A server of the handlers above and `more`, which takes any number of pings."""
    calls = Calls(options or GrpcOptions(port=0, http2_max_ping_strikes=0), more or {})
    calls.port = await calls.server.start()
    try:
        async with asyncio.timeout(3 * PATIENCE_S):
            yield calls
    finally:
        await calls.server.stop(0)
