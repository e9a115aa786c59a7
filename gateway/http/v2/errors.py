"""From a failure to a v2 answer: Triton's statuses, and `{"error": "…"}`."""

import orjson

from gateway.http.errors import HTTP_STATUS, error_response
from gateway.http.v2.exchange import JSON, Exchange
from sluice.errors import ErrorCode, SluiceError

_TRITONS = {ErrorCode.ALREADY_EXISTS: 400, ErrorCode.CANCELLED: 400, ErrorCode.UNKNOWN: 400}
"""Where Triton has another status than the other protocols here; codes that it lacks keep theirs."""
V2_STATUS: dict[ErrorCode, int] = {**HTTP_STATUS, **_TRITONS}
_OURS = (b"content-type", b"content-length")


class UnknownEncodingError(SluiceError):
    """A Content-Encoding that is not known; the answer says which are."""

    def __init__(self) -> None:
        super().__init__(ErrorCode.UNIMPLEMENTED, "Unsupported compression type", param="content-encoding")


def not_found() -> SluiceError:
    """No such route."""
    return SluiceError(ErrorCode.NOT_FOUND, "Not Found")


def method_not_allowed() -> SluiceError:
    return SluiceError(ErrorCode.METHOD_NOT_ALLOWED, "Method Not Allowed")


def error_json(error: SluiceError) -> bytes:
    """The body that says what went wrong. What is no Unicode in it is replaced."""
    return orjson.dumps({"error": _readable(error)})


def _readable(error: SluiceError) -> str:
    return error.message if error.message.isascii() else error.message.encode("utf-8", "replace").decode()


async def reply_error(exchange: Exchange, error: SluiceError) -> None:
    """Answer with `error`."""
    house = error_response(exchange.path, SluiceError(error.code, "", retry_after_s=error.retry_after_s))
    more = [header for header in house.raw_headers if header[0] not in _OURS]
    if isinstance(error, UnknownEncodingError):
        more.append((b"accept-encoding", b"gzip, deflate"))
    await exchange.reply(V2_STATUS[error.code], error_json(error), JSON, more)
