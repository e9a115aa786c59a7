"""Single requests besides those that are measured."""

import asyncio
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from sluice.load.config import LoadConfig, LoadTarget
from sluice.load.connection import ConnectionPool, encode_request

T = TypeVar("T")


class RunError(Exception):
    """The run could not begin. The message is for the user.

    `is_refusal` tells a server that answered with another status than 200 from one that cannot be reached.
    """

    def __init__(self, message: str, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


@dataclass(slots=True)
class _WholeBody:
    """Collects a response (a `connection.ResponseReceiver`)."""

    status: int = 0
    body: bytes = b""

    def on_status(self, status: int) -> None:
        self.status = status

    def on_body(self, piece: bytes, at: float) -> None:
        self.body += piece


async def get(pool: ConnectionPool, target: LoadTarget, path: str) -> bytes:
    """Get a path of the server. Raises RunError where it cannot be reached or does not answer 200."""
    response = _WholeBody()
    try:
        async with asyncio.timeout(target.timeout_s):
            connection = await pool.acquire()
            try:
                await connection.exchange(encode_request("GET", target.url, path, target.headers), response)
            finally:
                pool.release(connection)
    except (OSError, TimeoutError) as error:
        raise RunError(f"cannot reach {target.url}: {error}") from error
    if response.status != 200:
        answer = response.body[:200].decode(errors="replace")
        raise RunError(f"{target.url}{path} answers {response.status} ({answer})", is_refusal=True)
    return response.body


async def get_json(pool: ConnectionPool, config: LoadConfig, path: str, kind: type[T]) -> T:
    """Get JSON of a type. Raises RunError also for an answer that is none."""
    try:
        return msgspec.json.decode(await get(pool, config.target, path), type=kind)
    except msgspec.DecodeError as error:
        raise RunError(f"{config.target.url}{path}: {error}", is_refusal=True) from None
