"""How long steps take, by the tokens that come, where TensorRT-LLM tells no statistics."""

from typing import NamedTuple


class Step(NamedTuple):
    """What ran together, as far as can be told from outside."""

    num_tokens: int
    num_seqs: int
    seconds: float


class Pace:
    """Takes the tokens of one step for one as long as nobody has its second."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._members: set[int] = set()
        self._num_tokens = 0

    def observe(self, stream_id: int, num_tokens: int, now: float) -> Step | None:
        """A sequence got something, for which so many tokens ran; returns the step before, when that is complete."""
        step = None
        if stream_id in self._members:
            if self._began is not None:
                step = Step(self._num_tokens, len(self._members), now - self._began)
            self._began = now
            self._members.clear()
            self._num_tokens = 0
        self._members.add(stream_id)
        self._num_tokens += num_tokens
        return step

    def rest(self) -> None:
        """Nothing runs any more: the time until something does is no step's."""
        self._began = None
        self._members.clear()
        self._num_tokens = 0
