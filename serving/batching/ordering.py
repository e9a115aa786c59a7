"""Responses in the order in which their requests came (`preserve_ordering`)."""

from collections import deque

from serving.job import Job, Receive
from serving.request import InferResponse


class OrderedReceiver:
    """Stands before one request's `receive`, and keeps back what comes before its turn."""

    __slots__ = ("_held", "_is_over", "_order", "_receive", "job")

    def __init__(self, receive: Receive, order: "ResponseOrder") -> None:
        self._receive = receive
        self._order = order
        self._held: list[InferResponse] = []
        self._is_over = False
        self.job: Job | None = None
        """None until it was submitted, and once all has passed: the job knows its receiver."""

    def follow(self, job: Job) -> None:
        """It was submitted, and may be over already."""
        if job.is_finished:
            self._is_over = True
            self._order.advance()
        else:
            self.job = job

    @property
    def has_held(self) -> bool:
        return bool(self._held)

    @property
    def is_passed(self) -> bool:
        """Whether all that will come was passed on. A cancelled request gets no final response."""
        return not self._held and (self._is_over or (self.job is not None and self.job.is_finished))

    def receive(self, response: InferResponse) -> None:
        """Take a response, and pass it on now or in its turn. One that the queue gives, as time is up, has no turn."""
        self._is_over = self._is_over or response.is_final
        if response.error is not None and self.job is not None and not self.job.executed_batch_size:
            self._receive(response)
        else:
            self._held.append(response)
        self._order.advance()

    def release(self) -> None:
        """Pass on what was kept back."""
        held, self._held = self._held, []
        for response in held:
            self._receive(response)


class ResponseOrder:
    """Whose turn it is. A request's responses pass once all requests before it are over."""

    def __init__(self) -> None:
        self._line: deque[OrderedReceiver] = deque()
        self._is_advancing = False

    def open(self, receive: Receive) -> OrderedReceiver:
        """The next request's place in the line."""
        receiver = OrderedReceiver(receive, self)
        self._line.append(receiver)
        return receiver

    def discard(self, receiver: OrderedReceiver) -> None:
        """Its request was refused."""
        self._line.remove(receiver)
        self.advance()

    def advance(self) -> None:
        """Release whatever may go. What a receiver does in turn (submit, cancel) is seen by the same loop."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self._line:
                first = self._line[0]
                first.release()
                if first.is_passed:
                    first.job = None
                    self._line.popleft()
                elif not first.has_held:
                    return
        finally:
            self._is_advancing = False
