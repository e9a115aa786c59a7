"""Responses in the order in which their requests came (`preserve_ordering`)."""

from collections import deque

from serving.job import InferJob, ReceiveResponse
from serving.request import InferResponse
from serving.request_check import reshaped_dims
from serving.spec import ModelSpec
from serving.tensors.tensor import Tensor


class OrderedReceiver:
    """Stands before one request's `receive`, and keeps back what comes before its turn."""

    __slots__ = ("_held", "_is_over", "_order", "_receive", "job")

    def __init__(self, receive: ReceiveResponse, order: "ResponseOrder") -> None:
        self._receive = receive
        self._order = order
        self._held: list[InferResponse] = []
        self._is_over = False
        self.job: InferJob | None = None
        """None until it was submitted, and once all has passed: the job knows its receiver."""

    def follow(self, job: InferJob) -> None:
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

    def open(self, receive: ReceiveResponse) -> OrderedReceiver:
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


class OutputShapes:
    """Turns what the backend gives into what the configuration promises."""

    def __init__(self, spec: ModelSpec) -> None:
        self._dims = {
            each.name: (each.reshape, each.dims) for each in spec.outputs.values() if each.reshape is not None
        }
        self._num_leading = 1 if spec.max_batch_size > 0 else 0

    @property
    def are_any(self) -> bool:
        return bool(self._dims)

    def restored(self, outputs: list[Tensor]) -> list[Tensor]:
        """The same values in the promised shapes. One that the backend shaped otherwise stays as it is."""
        return [self._restored(each) for each in outputs]

    def _restored(self, tensor: Tensor) -> Tensor:
        found = self._dims.get(tensor.name)
        if found is None:
            return tensor
        given, promised = found
        leading, dims = tensor.shape[: self._num_leading], tensor.shape[self._num_leading :]
        if len(dims) != len(given):
            return tensor
        return tensor.reshaped(leading + reshaped_dims(dims, given, promised))
