"""The chance in one request's answer, which a second run of the request on another server finds again."""

import secrets
from collections.abc import Sequence
from contextvars import ContextVar
from hashlib import sha256


class Repetition:
    """Random bytes that are the same in every run of one request, in the order in which they are drawn.

    Nobody can predict them without the `seed`.
    """

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._num_drawn = 0

    def draw(self, num_bytes: int) -> bytes:
        """Return the next bytes, 32 at most."""
        self._num_drawn += 1
        return sha256(f"{self._seed}:{self._num_drawn}".encode()).digest()[:num_bytes]


current_repetition: ContextVar[Repetition | None] = ContextVar("current_repetition", default=None)
"""The repetition of the request that this task works for; None where the request runs once."""


def random_hex(num_bytes: int) -> str:
    """Return `num_bytes` random bytes (at most 32) as hexadecimal digits."""
    repetition = current_repetition.get()
    return secrets.token_hex(num_bytes) if repetition is None else repetition.draw(num_bytes).hex()


def random_text(characters: Sequence[str], length: int) -> str:
    """Return a text of so many of the `characters`, of which there are 256 at most; it has 32 at most."""
    repetition = current_repetition.get()
    if repetition is None:
        return "".join(secrets.choice(characters) for _ in range(length))
    return "".join(characters[byte % len(characters)] for byte in repetition.draw(length))
