"""Translates failures of an API into errors for the gateway's clients."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:
    from openai import APIConnectionError, APIError, APIStatusError

_MAX_MESSAGE_CHARS = 500
"""Characters of the API's message that are passed on."""
_KEY_REFUSED = frozenset({401, 403})
_BAD_REQUEST = frozenset({400, 413, 422})
_CONTEXT_CODE = "context_length_exceeded"
_LATE = frozenset({408, 504})


class ApiErrors:
    """Makes the errors of one API, which name it in every message.

    No message shows the API's key, or lets a client believe that their own key was refused.
    """

    def __init__(self, model: str, host: str, key: str) -> None:
        """Take the model's name at the API, the API's host, and the key to hide in messages."""
        self._model = model
        self._subject = f"remote model '{model}' at {host}"
        self._key = key

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Translate failures within the context, including unreadable answers, to SluiceError."""
        from openai import APIConnectionError, APIError, APIStatusError, OpenAIError

        try:
            yield
        except APIStatusError as error:
            raise self._of_status(error) from None
        except APIConnectionError as error:
            raise self._of_connection(error) from None
        except APIError as error:
            raise self.unavailable(f"failed: {self._message(error)}") from None
        except TimeoutError:
            raise SluiceError(ErrorCode.DEADLINE, f"{self._subject} did not answer within the time limit") from None
        except OpenAIError as error:
            raise self.unavailable(f"cannot be asked: {self._shown(str(error))}") from None
        except (ValueError, msgspec.MsgspecError) as error:
            raise self.unreadable(error) from None

    def unreadable(self, error: Exception) -> SluiceError:
        return self.unavailable(f"gave an answer that no OpenAI-compatible API gives: {self._shown(str(error))}")

    def unavailable(self, what: str, retry_after_s: float | None = None) -> SluiceError:
        """Return the error for a remote model that cannot answer now. `what` completes the sentence about it."""
        return SluiceError(ErrorCode.UNAVAILABLE, f"{self._subject} {what}", retry_after_s=retry_after_s)

    def _of_status(self, error: "APIStatusError") -> SluiceError:
        status = error.status_code
        retry_after_s = parse_retry_after(error.response.headers)
        if status in _KEY_REFUSED:
            # Without the API's message, which may quote the key.
            return self.unavailable(f"refused our key ({status})")
        reason = self._message(error)
        if status in _BAD_REQUEST:
            refusal = SluiceError(
                ErrorCode.INVALID, f"{self._subject} refused the request: {reason}", param=error.param
            )
            refusal.exceeds_context = _exceeds_context(error)
            return refusal
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            message = f"{self._subject} is overloaded: {reason}"
            return SluiceError(ErrorCode.OVERLOADED, message, retry_after_s=retry_after_s)
        if status == HTTPStatus.NOT_FOUND:
            return self.unavailable(f"is not found there (404): {reason}")
        if status in _LATE:
            return SluiceError(ErrorCode.DEADLINE, f"{self._subject} took too long ({status}): {reason}")
        return self.unavailable(f"failed ({status}): {reason}", retry_after_s)

    def _of_connection(self, error: "APIConnectionError") -> SluiceError:
        from httpx2 import ConnectTimeout
        from openai import APITimeoutError

        cause = error.__cause__
        if isinstance(error, APITimeoutError) and not isinstance(cause, ConnectTimeout):
            return SluiceError(ErrorCode.DEADLINE, f"{self._subject} did not answer within the time limit")
        reason = f"{type(cause).__name__} {cause}" if cause is not None else error.message
        return self.unavailable(f"cannot be reached, or broke off: {self._shown(reason)}")

    def _message(self, error: "APIError") -> str:
        """Return the API's own message, or the client's where the API gave none."""
        body = error.body
        if isinstance(body, Mapping):
            message = body.get("message") or body.get("detail") or body.get("error")
            if isinstance(message, str):
                return self._shown(message)
        return self._shown(body if isinstance(body, str) and body.strip() else error.message)

    def _shown(self, text: str) -> str:
        text = text.replace(self._key, "***") if self._key else text
        return text.strip()[:_MAX_MESSAGE_CHARS]  # cut last, or half a key could be left at the end


def _exceeds_context(error: "APIStatusError") -> bool:
    """Whether the request is too long for the model: by OpenAI's code, or by vLLM's words, which has no code."""
    return error.code == _CONTEXT_CODE or "maximum context length" in error.message


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds after which the API asks to be called again, or None. A date is not understood."""
    for name, per_second in (("retry-after-ms", 1000), ("retry-after", 1)):
        try:
            seconds = float(headers.get(name, "")) / per_second
        except ValueError:
            continue
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    return None
