"""What an exception of TensorRT-LLM means: the engine's end, a fault of the request, or an error that is its alone."""

import re

from sluice.errors import ErrorCode, SluiceError


class EngineLost(Exception):
    """TensorRT-LLM cannot go on; who watches this process starts another."""


_FATAL_NAMES = frozenset({"EngineDeadError", "BrokenExecutor", "BrokenProcessPool"})
_FATAL = re.compile(
    r"shutting down|is shut ?down|executor has failed|worker (process )?(died|is dead|terminated)"
    r"|rank \d+ (died|is gone)",
    re.I,
)
_OF_REQUEST = "RequestError"
"""TensorRT-LLM's class for what fails one request. When it is the engine that failed, its health says so."""
_AT_FAULT = re.compile(
    r"should not exceed|cannot exceed|exceeds? (the )?max|larger than (the )?max|(prompt|sequence) is too long"
    r"|must be (less|greater|between|at (most|least)|smaller|larger)|token ids? .*out of range"
    r"|not supported|unsupported|guided decoding error(?!: internal)",
    re.I,
)


def is_fatal(error: BaseException) -> bool:
    """Whether it says itself that nothing will come any more. Others may be fatal too: ask for the health."""
    return any(_is_fatal(each) for each in _chain(error))


def is_response(error: BaseException) -> bool:
    """Whether it came as one request's response: its text says what happened, and where it was raised nothing."""
    return _OF_REQUEST in _names(error)


def _is_fatal(error: BaseException) -> bool:
    if is_response(error):  # its text may quote the request: a client could put any words into it
        return False
    return bool(_FATAL_NAMES & _names(error)) or (isinstance(error, RuntimeError) and bool(_FATAL.search(str(error))))


def _names(error: BaseException) -> set[str]:
    return {base.__name__ for base in type(error).__mro__}


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__
    return chain


def refusal(error: Exception) -> SluiceError:
    """`error`, which was raised when the request was handed over: ValueErrors are its own arguments' fault."""
    if isinstance(error, SluiceError):
        return error
    if isinstance(error, ValueError):
        return SluiceError(ErrorCode.INVALID, f"TensorRT-LLM refuses the request: {error}")
    return internal()


def failure(error: Exception) -> SluiceError:
    """`error`, which came in the request's responses.

    TensorRT-LLM tells its checks of arguments there too, as text alone.
    """
    if isinstance(error, SluiceError):
        return error
    if _AT_FAULT.search(str(error)) and not is_fatal(error):
        return SluiceError(ErrorCode.INVALID, f"TensorRT-LLM refuses the request: {error}")
    return internal()


def internal() -> SluiceError:
    """Nobody's fault but the engine's; what it was is in the log."""
    return SluiceError(ErrorCode.INTERNAL, "the engine failed while it worked on this request")
