"""What models ask of the server itself: one question, one answer."""

import sys
from typing import ClassVar

from serving.backends.python.frames import LetGo, Question
from serving.backends.python.worker.channel import Channel
from serving.backends.python.worker.errors import TritonModelException


class Server:
    """The server behind the worker's socket. Any thread."""

    _channel: ClassVar[Channel | None] = None
    """Set once, by the worker."""

    @classmethod
    def ask(cls, question: Question, failure: str) -> float | bool | None:
        """Raises TritonModelException that begins with `failure` where the server refuses."""
        if cls._channel is None:
            raise RuntimeError("the server can be asked in a worker process only")
        answer = cls._channel.ask(question)
        if answer.error is not None:
            raise TritonModelException(f"{failure}: {answer.error[1]}")
        return answer.value

    @classmethod
    def let_go(cls, numbers: list[int]) -> None:
        """Hold these families and metrics no more. At the worker's end nobody says so."""
        if cls._channel is not None and not sys.is_finalizing():
            cls._channel.post(LetGo(numbers))
            cls._channel.flush()

    @classmethod
    def close(cls) -> None:
        """Nothing is asked any more."""
        cls._channel = None
