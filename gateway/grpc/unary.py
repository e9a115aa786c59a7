"""How every unary call is served: bytes in, bytes out, and one place for what goes wrong."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from gateway.grpc.errors import abort, as_sluice_error
from gateway.grpc.infer import parse

Call = Callable[[bytes, Any], Awaitable[bytes]]


def unary(name: str, call: Call) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """A handler of raw messages, which no layer of gRPC copies or decodes."""

    async def serve(raw: bytes, context: Any) -> bytes:
        try:
            return await call(raw, context)
        except Exception as error:
            refusal = as_sluice_error(error, name)
            # It holds the frames that it passed, and they the job that holds it: work for the garbage collector.
            error.__traceback__ = None
            await abort(context, refusal)

    return grpc.unary_unary_rpc_method_handler(serve)


def simple(name: str, request_type: Any, answer: Callable[[Any], Any]) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """A handler of a function from message to message that does not wait."""

    async def call(raw: bytes, context: Any) -> bytes:
        serialized: bytes = answer(parse(request_type, raw)).SerializeToString()
        return serialized

    return unary(name, call)


def waiting(
    name: str, request_type: Any, answer: Callable[[Any], Awaitable[Any]]
) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """The same of one that waits."""

    async def call(raw: bytes, context: Any) -> bytes:
        serialized: bytes = (await answer(parse(request_type, raw))).SerializeToString()
        return serialized

    return unary(name, call)
