import pytest

from engine.delegated.tensorrt_llm.loop.failures import EngineLost, failure, is_fatal, refusal
from engine.delegated.tensorrt_llm.loop.watch import Progress, stall_timeout_s
from sluice.errors import ErrorCode, SluiceError


class RequestError(RuntimeError): ...


class EngineDeadError(RuntimeError): ...


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("LLM is shutting down"),
        RuntimeError("The executor has failed: rank 1 is gone"),
        RuntimeError("Executor worker died during initialization"),
        EngineDeadError("model worker died"),
    ],
)
def test_what_ends_the_engine(error: Exception) -> None:
    assert is_fatal(error)
    wrapped = RequestError("could not be sent")
    wrapped.__cause__ = error
    assert is_fatal(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        RequestError("prompt is too long"),
        RequestError("guided decoding error: no rule 'executor has failed' in the grammar"),
        ValueError("shutting down"),
        RuntimeError("CUDA error: misaligned"),
    ],
)
def test_what_need_not(error: Exception) -> None:
    assert not is_fatal(error)


def test_whose_fault_it_is() -> None:
    limit = "The sum of prompt length (9) should not exceed max_num_tokens (4)"
    assert refusal(ValueError(limit)).code is ErrorCode.INVALID
    assert refusal(TypeError("unexpected keyword")).code is ErrorCode.INTERNAL
    assert failure(RequestError(limit)).code is ErrorCode.INVALID
    assert limit in failure(RequestError(limit)).message
    assert failure(RequestError("Guided decoding error: unclosed class in [0-9")).code is ErrorCode.INVALID
    assert failure(RequestError("Guided decoding error: internal error in fill")).code is ErrorCode.INTERNAL
    internal = failure(RequestError("CUDA error: invalid argument"))
    assert (internal.code, "CUDA" in internal.message) == (ErrorCode.INTERNAL, False)
    own = SluiceError(ErrorCode.DEADLINE, "too late")
    assert failure(own) is refusal(own) is own


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_stall_timeout_is_a_time(text: str) -> None:
    with pytest.raises(SluiceError, match="stall_timeout_s must be a number of seconds above 0"):
        stall_timeout_s({"stall_timeout_s": text})


def test_a_stall() -> None:
    assert stall_timeout_s({}) == 60.0
    progress = Progress(stall_timeout_s({"stall_timeout_s": "2.5"}), 10.0)
    progress.check(12.5)
    progress.made(12.0)
    progress.check(14.0)
    with pytest.raises(EngineLost, match=r"for 3\.0 s \(stall_timeout_s\)"):
        progress.check(15.0)
