"""The meaning of TensorRT-LLM's exceptions: the engine's end, a fault of the request, or an error of its own."""

import re

from engine.delegated.interface import Failure, internal_error
from sluice.errors import ErrorCode, SluiceError

_FATAL_NAMES = frozenset({"EngineDeadError", "BrokenExecutor", "BrokenProcessPool"})
_FATAL = re.compile(
    r"shutting down|is shut ?down|executor has failed|worker (process )?(died|is dead|terminated)"
    r"|rank \d+ (died|is gone)",
    re.I,
)
_REQUEST_ERROR = "RequestError"
"""TensorRT-LLM's class for what fails one request. When it is the engine that failed, its health says so."""
_AT_FAULT = re.compile(
    r"should not exceed|cannot exceed|exceeds? (the )?max|larger than (the )?max|(prompt|sequence) is too long"
    r"|must be (less|greater|between|at (most|least)|smaller|larger)|token ids? .*out of range"
    r"|not supported|unsupported|guided decoding error(?!: internal)",
    re.I,
)
"""Texts of its checks of a request's arguments, which come as a response."""


def classify(error: Exception, *, at_submit: bool) -> Failure:
    """Explain an exception of `generate_async` (`at_submit`) or of reading a RequestOutput."""
    is_fatal = any(map(_is_fatal, _chain(error)))
    return Failure(_answer(error, at_submit=at_submit, is_fatal=is_fatal), is_fatal, _is_response(error))


def _answer(error: Exception, *, at_submit: bool, is_fatal: bool) -> SluiceError:
    if isinstance(error, SluiceError):
        return error
    # A check of arguments shows as a ValueError at once, or as text alone among the responses.
    is_at_fault = isinstance(error, ValueError) if at_submit else bool(_AT_FAULT.search(str(error))) and not is_fatal
    if is_at_fault:
        return SluiceError(ErrorCode.INVALID, f"TensorRT-LLM refuses the request: {error}")
    return internal_error()


def _is_fatal(error: BaseException) -> bool:
    if _is_response(error):  # its text may quote the request: a client could put any words into it
        return False
    return bool(_FATAL_NAMES & _names(error)) or (isinstance(error, RuntimeError) and bool(_FATAL.search(str(error))))


def _is_response(error: BaseException) -> bool:
    return _REQUEST_ERROR in _names(error)


def _names(error: BaseException) -> set[str]:
    return {base.__name__ for base in type(error).__mro__}


def _chain(error: BaseException) -> list[BaseException]:
    """Return the exception and its causes."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__
    return chain
