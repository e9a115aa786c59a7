"""Requests that the server sends to its own application, without a connection."""

import asyncio

from starlette.types import ASGIApp, Message

from sluice.engine.types import BACKGROUND_PRIORITY
from sluice.gateway.answers.batches.line_run import Answered
from sluice.gateway.calls import NO_RETRY
from sluice.gateway.front.http.access import IN_PROCESS
from sluice.gateway.front.http.request import PRIORITY_HEADER
from sluice.gateway.tenancy.access.control import TENANT_HEADER
from sluice.gateway.tenancy.access.identity import Identity


class InProcessClient:
    """Sends requests of batches: they come after all others, and count for their tenant."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(
        self, url: str, body: bytes, *, request_id: str, tenant: str, sender: Identity | None
    ) -> Answered:
        """Return the answer to a POST. Cancelling the call is the client's disconnect."""
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": request_id,
            PRIORITY_HEADER: str(BACKGROUND_PRIORITY),
            **({TENANT_HEADER: tenant} if tenant else {}),
        }
        scope = {
            "type": "http",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            IN_PROCESS: sender,
        }
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        status, is_final, answer = 0, False, bytearray()

        async def receive() -> Message:
            if pending:
                return pending.pop()
            await asyncio.Event().wait()  # the client stays
            raise AssertionError("unreachable")

        async def send(message: Message) -> None:
            nonlocal status, is_final
            if message["type"] == "http.response.start":
                status = message["status"]
                is_final = NO_RETRY in message["headers"]
            else:
                answer.extend(message.get("body", b""))

        await self._app(scope, receive, send)
        return Answered(status, bytes(answer), is_final)
