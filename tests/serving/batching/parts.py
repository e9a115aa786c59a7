"""A model with instances whose batches end when the test says so."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.batching.scheduled_model import ScheduledModel
from sluice.serving.instance import Instance, Placement
from sluice.serving.job import InferJob
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSource
from sluice.serving.tensors.tensor import Tensor

CONFIG = """
name: "echo" backend: "test" max_batch_size: 8
input { name: "X" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ -1 ] }
"""


class HeldInstance(Instance):
    """Runs a batch until `finish`. Answers each job with its own input."""

    def __init__(self, name: str = "held", placement: Placement | None = None) -> None:
        self.name = name
        self.placement = placement
        self.batches: list[list[InferJob]] = []
        self.is_up = True
        self.is_closed = False
        self._running: tuple[list[InferJob], Callable[[], None]] | None = None

    @property
    def is_ready(self) -> bool:
        return self.is_up

    @property
    def is_running(self) -> bool:
        return self._running is not None

    @property
    def is_idle(self) -> bool:
        return not self.is_running

    def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        assert self._running is None, "an instance runs one batch at a time"
        self.batches.append(jobs)
        self._running = (jobs, done)

    def answer(self) -> None:
        """All jobs of the batch get their responses, but the instance is not free yet."""
        assert self._running is not None
        for job in self._running[0]:
            job.respond(InferResponse(outputs=[job.request.inputs["X"].renamed("Y")]))

    def finish(self) -> None:
        """The batch is answered, and the instance is free."""
        assert self._running is not None
        self.answer()
        done = self._running[1]
        self._running = None
        done()

    def die(self) -> None:
        """Its process is gone. What it runs goes on: a test of that has an instance of its own."""
        self.is_up = False

    def come_back(self) -> None:
        self.is_up = True

    async def close(self) -> None:
        self.is_closed = True
        if self._running is not None:
            for job in self._running[0]:
                job.fail(SluiceError(ErrorCode.UNAVAILABLE, "closed"))
            self._running = None

    @property
    def ids(self) -> list[list[str]]:
        """The request ids of each batch that ran."""
        return [[job.request.id for job in batch] for batch in self.batches]


class AtOnceInstance(Instance):
    """Answers within `execute`."""

    name = "at_once"

    def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        for job in jobs:
            job.respond(InferResponse(outputs=[job.request.inputs["X"].renamed("Y")]))
        done()

    async def close(self) -> None:
        pass


class Client:
    """Submits, and keeps what comes back in the order in which it comes."""

    def __init__(self, model: ScheduledModel) -> None:
        self.model = model
        self.answered: list[str] = []
        self.errors: dict[str, SluiceError] = {}

    def submit(self, name: str, rows: int = 1, width: int = 1, priority: int = 0, timeout_us: int = 0) -> InferJob:
        return self.model.submit(request(name, rows, width, priority, timeout_us), self.receive)

    def submit_word(self, word: str) -> InferJob:
        """Submit what a word of a script says."""
        name, _, timeout_us = word.partition("@")
        name, _, priority = name.partition("^")
        name, _, width = name.partition("/")
        return self.submit(name, 1, int(width or 1), int(priority or 0), int(timeout_us or 0))

    def receive(self, response: InferResponse) -> None:
        if response.error is not None:
            self.errors[response.id] = response.error
        self.answered.append(response.id)


class Script:
    """What happens to a model on held instances, in words.

    `a` submits a request of that name, `a/2` one of width 2, `a^1` one of priority 1, `a@1` one that waits for a
    microsecond at most, and `-a` cancels it. `|` lets the loop go round, `.0` ends the batch of instance 0, `x0` and
    `+0` take its process away and bring it back.
    """

    def __init__(self, instances: "list[HeldInstance]", submit: Callable[[str], InferJob]) -> None:
        self.instances = instances
        self.submit = submit
        self.jobs: dict[str, InferJob] = {}

    async def play(self, words: str) -> str:
        """Return the batches that ran, by instance: `ab c; d` are two of the first and one of the second."""
        for word in words.split():
            await self._do(word[0], word[1:], word)
        return "; ".join(
            " ".join("".join(each or "--" for each in batch) for batch in one.ids) for one in self.instances
        )

    async def _do(self, kind: str, rest: str, word: str) -> None:
        match kind:
            case "|":
                await turns(12)
            case ".":
                self.instances[int(rest)].finish()
            case "x":
                self.instances[int(rest)].die()
            case "+":
                self.instances[int(rest)].come_back()
            case "-":
                self.jobs[rest].cancel()
            case _:
                self.jobs[word.rstrip("+-")] = self.submit(word)


def request(name: str, rows: int = 1, width: int = 1, priority: int = 0, timeout_us: int = 0) -> InferRequest:
    array = np.zeros((rows, width), np.int32)
    return InferRequest({"X": Tensor("X", "INT32", array.shape, array=array)}, name, (), {}, priority, timeout_us)


def config_of(extra: str = "", base: str = CONFIG) -> ModelConfig:
    return text_format.Parse(base + extra, ModelConfig())


def model_of(extra: str, *instances: Instance, base: str = CONFIG) -> ScheduledModel:
    return ScheduledModel(ModelSource(Path("/models/echo"), 1, config_of(extra, base)), instances)


async def turns(count: int = 3) -> None:
    """Let the event loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)
