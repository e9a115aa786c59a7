"""One key for everybody: `Authorization: Bearer KEY`, asked of every path but the health probes."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.errors import error_response
from sluice.errors import ErrorCode, SluiceError

_OPEN_PATHS = frozenset({"/health", "/v2/health/live", "/v2/health/ready"})


class ApiKeyMiddleware:
    """Answers 401, in the protocol's own shape, to requests without the key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            refusal = self._check(Headers(scope=scope).get("authorization"))
            if refusal is not None:
                await error_response(scope["path"], refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, header: str | None) -> SluiceError | None:
        """Why a request with this Authorization header is refused. Never repeats what came."""
        if header is None:
            return _unauthenticated("this server asks for an API key: send the header 'Authorization: Bearer KEY'")
        scheme, _, key = header.partition(" ")
        if scheme.lower() != "bearer":
            return _unauthenticated("the Authorization header must read 'Bearer KEY'")
        if not hmac.compare_digest(key.strip().encode("latin-1"), self._key):
            return _unauthenticated("the API key is wrong")
        return None


def _unauthenticated(message: str) -> SluiceError:
    return SluiceError(ErrorCode.UNAUTHENTICATED, message)
