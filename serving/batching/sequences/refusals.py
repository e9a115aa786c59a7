"""What clients of sequences are told, in Triton's words where it has some."""

from serving.batching.sequences.known import key_of
from sluice.errors import ErrorCode, SluiceError


def without_id(model: str) -> SluiceError:
    return _invalid(f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID")


def of_several_rows(model: str) -> SluiceError:
    return _invalid(
        f"inference request to model '{model}' must specify batch-size 1 due to requirements of sequence batcher"
    )


def not_started(model: str, correlation_id: int | str) -> SluiceError:
    return _invalid(
        f"inference request for sequence {key_of(correlation_id)} to model '{model}' must specify the START flag on "
        "the first request of the sequence"
    )


def loss_of_sequence(model: str, correlation_id: int | str, instance: str) -> str:
    """What has become of it."""
    return (
        f"the state of sequence {key_of(correlation_id)} of model '{model}' was lost with a process of {instance}: "
        "begin the sequence again, with the START flag"
    )


def loss_of_request(instance: str) -> str:
    """What has become of one that is run several times."""
    return f"the state of the request was lost with a process of {instance}: send it again"


def loss(words: str) -> SluiceError:
    """For its next requests, and for those that were waiting already."""
    return SluiceError(ErrorCode.UNAVAILABLE, words)


def waited_too_long() -> SluiceError:
    return SluiceError(ErrorCode.UNAVAILABLE, "timeout of the corresponding sequence has been expired")


def cancelled() -> SluiceError:
    return SluiceError(ErrorCode.CANCELLED, "the request was cancelled")


def beside_cancelled() -> SluiceError:
    return SluiceError(ErrorCode.CANCELLED, "a request of the same sequence was cancelled")


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)
