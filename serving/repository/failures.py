"""Errors of loads: Triton's sentences with the cause in them."""

from collections.abc import Mapping

from sluice.errors import ErrorCode, SluiceError, invalid_argument

_KINDS = {
    ErrorCode.INVALID: "Invalid argument",
    ErrorCode.NOT_FOUND: "Not found",
    ErrorCode.ALREADY_EXISTS: "Already exists",
    ErrorCode.UNIMPLEMENTED: "Unsupported",
    ErrorCode.UNAVAILABLE: "Unavailable",
    ErrorCode.UNKNOWN: "Unknown",
}
"""Triton's names of error codes; all others are Internal."""


class ModelFailure(SluiceError):
    """A model cannot be loaded as a whole; `reason` is for the repository index, and without a `message` for all."""

    def __init__(self, name: str, reason: str, message: str = "") -> None:
        super().__init__(ErrorCode.INVALID, message or f"load failed for model '{name}': {reason}\n")
        self.reason = reason


class StoreFailure(SluiceError):
    """A remote store cannot be read now. A later attempt may succeed."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, message)


class UnexpectedFailure(SluiceError):
    """A backend has raised something else than SluiceError: `__cause__`, which belongs into the log with its trace."""


def failure_reason(error: SluiceError) -> str:
    """Return the repository index's reason for what failed with this error."""
    if isinstance(error, ModelFailure):
        return error.reason
    return f"{_KINDS.get(error.code, 'Internal')}: {error.message}"


def poll_failed(name: str, cause: SluiceError | None = None) -> SluiceError:
    """Return the error for an absent or invalid model. Triton only logs the cause; here the client is told, too."""
    message = f"failed to load '{name}', failed to poll from model repository"
    if isinstance(cause, StoreFailure):
        return StoreFailure(f"{message}: {cause.message}")
    return SluiceError(ErrorCode.INTERNAL, f"{message}: {cause.message}" if cause else message)


def versions_failed(name: str, problems: Mapping[int, SluiceError]) -> SluiceError:
    """Return the error for a model some of whose versions cannot be loaded. An unexpected one of these is its cause."""
    each = (
        f"version {version} is at UNAVAILABLE state: {failure_reason(problems[version])};\n"
        for version in sorted(problems)
    )
    failure = invalid_argument(f"load failed for model '{name}': {''.join(each)}")
    failure.__cause__ = next(filter(unexpected_cause, problems.values()), None)
    return failure


def as_sluice_error(error: BaseException) -> SluiceError:
    if isinstance(error, SluiceError):
        return error
    return UnexpectedFailure(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")


def unexpected_cause(error: BaseException | None) -> BaseException | None:
    """Return the exception behind an UnexpectedFailure that has led to this error."""
    while error is not None and not isinstance(error, UnexpectedFailure):
        error = error.__cause__
    return error and error.__cause__
