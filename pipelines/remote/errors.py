"""What a failed request to the API means for who asked us."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:
    from openai import APIConnectionError, APIError, APIStatusError

_LONGEST_MESSAGE = 500
"""Characters of the remote's words that are passed on."""
_KEY_REFUSED = frozenset({401, 403})
_BAD_REQUEST = frozenset({400, 413, 422})
_LATE = frozenset({408, 504})


class ApiErrors:
    """Names the remote in every error. No message shows our key, or has a client believe that theirs was refused."""

    def __init__(self, model: str, host: str, key: str) -> None:
        """`model` is its name at the API."""
        self._model = model
        self._remote = f"remote model '{model}' at {host}"
        self._key = key

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Raises SluiceError for whatever goes wrong with the API within, and for an answer that cannot be read."""
        from openai import APIConnectionError, APIError, APIStatusError, OpenAIError

        try:
            yield
        except APIStatusError as error:
            raise self._of_status(error) from None
        except APIConnectionError as error:
            raise self._of_connection(error) from None
        except APIError as error:
            raise self.unavailable(f"failed: {self._words(error)}") from None
        except TimeoutError:
            raise SluiceError(ErrorCode.DEADLINE, f"{self._remote} did not answer within the time limit") from None
        except OpenAIError as error:
            raise self.unavailable(f"cannot be asked: {self._shown(str(error))}") from None
        except (ValueError, msgspec.MsgspecError) as error:
            raise self.unreadable(error) from None

    def unreadable(self, error: Exception) -> SluiceError:
        """For an answer that is not what was asked for."""
        return self.unavailable(f"gave an answer that no OpenAI-compatible API gives: {self._shown(str(error))}")

    def unavailable(self, what: str, retry_after_s: float | None = None) -> SluiceError:
        return SluiceError(ErrorCode.UNAVAILABLE, f"{self._remote} {what}", retry_after_s=retry_after_s)

    def _of_status(self, error: "APIStatusError") -> SluiceError:
        status = error.status_code
        retry_after_s = parse_retry_after(error.response.headers)
        if status in _KEY_REFUSED:
            # Not in the remote's words: they may quote the key.
            return self.unavailable(f"refused our key ({status})")
        words = self._words(error)
        if status in _BAD_REQUEST:
            return SluiceError(ErrorCode.INVALID, f"{self._remote} refused the request: {words}", param=error.param)
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            message = f"{self._remote} is overloaded: {words}"
            return SluiceError(ErrorCode.OVERLOADED, message, retry_after_s=retry_after_s)
        if status == HTTPStatus.NOT_FOUND:
            return self.unavailable(f"is not found there (404): {words}")
        if status in _LATE:
            return SluiceError(ErrorCode.DEADLINE, f"{self._remote} took too long ({status}): {words}")
        return self.unavailable(f"failed ({status}): {words}", retry_after_s)

    def _of_connection(self, error: "APIConnectionError") -> SluiceError:
        from httpx2 import ConnectTimeout
        from openai import APITimeoutError

        cause = error.__cause__
        if isinstance(error, APITimeoutError) and not isinstance(cause, ConnectTimeout):
            return SluiceError(ErrorCode.DEADLINE, f"{self._remote} did not answer within the time limit")
        reason = f"{type(cause).__name__} {cause}" if cause is not None else error.message
        return self.unavailable(f"cannot be reached, or broke off: {self._shown(reason)}")

    def _words(self, error: "APIError") -> str:
        """The API's own message, where it gave one."""
        body = error.body
        if isinstance(body, Mapping):
            said = body.get("message") or body.get("detail") or body.get("error")
            if isinstance(said, str):
                return self._shown(said)
        return self._shown(body if isinstance(body, str) and body.strip() else error.message)

    def _shown(self, text: str) -> str:
        text = text.replace(self._key, "***") if self._key else text
        return text.strip()[:_LONGEST_MESSAGE]  # last, or half a key could be left at the end


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """When the API wants to be asked again, in seconds; a date is not understood."""
    for name, per_second in (("retry-after-ms", 1000), ("retry-after", 1)):
        try:
            seconds = float(headers.get(name, "")) / per_second
        except ValueError:
            continue
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    return None
