"""The methods of the server, by path, and what stands before them: restrictions, and who may call."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from sluice.gateway.api.v2.grpc.access import guard, restrict
from sluice.gateway.api.v2.grpc.messages import WireMessage
from sluice.gateway.api.v2.grpc.tracing import trace_call
from sluice.gateway.calls import CallLog
from sluice.gateway.front.restrictions import Restrictions
from sluice.gateway.tracing.tracer import Tracer

Handler = Any
"""A `grpc.RpcMethodHandler`, which has no types."""


class CallDetails(NamedTuple):
    """What is known of a call before its first message. grpcio's own type has the same fields."""

    method: str
    invocation_metadata: Iterable[tuple[str, str | bytes]]


class DirectCall(Protocol):
    """A call whose only message a direct method answers: by one of `respond`, `fail` and `go_on`, unless its client is
    gone."""

    on_gone: Callable[[], None] | None
    """Called where the client is gone before the answer."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...

    def respond(self, message: WireMessage) -> None:
        """Answer with `message`."""

    def fail(self, error: Exception) -> None:
        """Answer with an error."""

    def go_on(self, work: Coroutine[Any, Any, WireMessage]) -> None:
        """Answer with the message that `work` returns, or the error that it raises."""


class DirectMethod(Protocol):
    """A method that can answer plain requests without a task."""

    def begin(self, raw: bytes | memoryview, call: DirectCall) -> bool:
        """Begin to answer; False for a request that only the method's handler can. Raises SluiceError."""


class Methods:
    """Finds the handler of a call."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        direct: Mapping[str, DirectMethod],
        calls: CallLog,
        restrictions: Restrictions,
        tracer: Tracer | None = None,
    ) -> None:
        """`handlers`: by full path, such as /grpc.health.v1.Health/Check. `direct`: of some of these paths."""
        self._handlers = handlers
        self._direct = direct
        self._calls = calls
        self._restrictions = restrictions
        self._tracer = tracer or Tracer()

    def find_direct(self, path: str) -> DirectMethod | None:
        """Return what answers plain calls of a path without a task; None where there is none, or a guard before it."""
        is_guarded = self._calls.is_active or self._restrictions or self._tracer.is_exporting
        return None if is_guarded else self._direct.get(path)

    def find(self, details: CallDetails) -> Handler | None:
        """Return the handler of a call, behind whatever guards it; None for a method that there is not.

        Runs in the call's own task: a guard makes the call the current one.
        """
        handler = self._handlers.get(details.method)
        if handler is None:
            return None
        if self._tracer.is_active:
            handler = trace_call(self._tracer, details, handler)
        if self._restrictions:
            handler = restrict(self._restrictions, details) or handler
        return guard(self._calls, details, handler) if self._calls.is_active else handler


class CallHost(Protocol):
    """The server, as its calls see it."""

    @property
    def methods(self) -> Methods: ...

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """Handlers that have not ended."""

    def forget_task(self, task: asyncio.Task[None]) -> None:
        """Note that a handler has ended."""

    @property
    def max_message_bytes(self) -> int: ...

    @property
    def compression_level(self) -> int:
        """zlib's level for responses; 0 is none."""

    def peer_of(self, connection: Any) -> str:
        """Return a client's address, as gRPC writes it."""

    def identity_of(self, connection: Any) -> dict[str, list[bytes]]:
        """Return what a client's certificate says."""


def service_handlers(service: str, methods: Mapping[str, Handler]) -> dict[str, Handler]:
    """Return the handlers of `service` by full path."""
    return {f"/{service}/{name}": handler for name, handler in methods.items()}
