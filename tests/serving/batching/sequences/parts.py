"""A sequence model on instances of a test's own, and its clients."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.batching.rate_limiter import RateLimiter
from sluice.serving.batching.scheduled_model import ScheduledModel
from sluice.serving.batching.sequences.batcher import SequenceBatcher
from sluice.serving.instance import Instance
from sluice.serving.job import InferJob
from sluice.serving.request import InferRequest, InferResponse, SequenceFlag
from sluice.serving.spec import ModelSource
from sluice.serving.tensors.tensor import Tensor
from tests.serving.backends.onnxruntime.parts import context
from tests.serving.batching.parts import HeldInstance, config_of

START, END, NONE = SequenceFlag.START, SequenceFlag.END, SequenceFlag.NONE

CONFIG = """
name: "sums" backend: "test" max_batch_size: 4
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
"""
CONTROLS = """
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 2, 3 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
  control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_%s } }
"""


def sequences(
    strategy: str = "oldest { max_candidate_sequences: 4 }", idle_us: int = 60_000_000, id: str = "UINT64"
) -> str:
    return f"sequence_batching {{ max_sequence_idle_microseconds: {idle_us} {strategy} {CONTROLS % id} }}"


class Clients:
    """Clients of one model, who submit requests of sequences."""

    def __init__(
        self,
        extra: str,
        *instances: Instance,
        base: str = CONFIG,
        folder: Path = Path("/models/sums"),
        limiter: RateLimiter | None = None,
    ) -> None:
        lent = dataclasses.replace(context(), rate_limiter=limiter)
        self.model = ScheduledModel(ModelSource(folder, 1, config_of(extra, base)), instances, context=lent)
        self.answered: list[str] = []
        self.responses: dict[str, InferResponse] = {}
        """The last one of each request."""
        self.errors: dict[str, SluiceError] = {}

    @property
    def batcher(self) -> SequenceBatcher:
        assert self.model._sequences is not None
        return self.model._sequences

    def submit(
        self,
        name: str,
        of: int | str,
        flags: SequenceFlag = NONE,
        rows: int = 1,
        value: int = 1,
        width: int = 1,
        timeout_us: int = 0,
        outputs: tuple[str, ...] = (),
    ) -> InferJob:
        shape = (rows, width) if self.model.spec.max_batch_size else (width,)
        x = Tensor.of("X", np.full(shape, value, np.int32))
        request = InferRequest({"X": x}, name, outputs, correlation_id=of, sequence=flags, timeout_us=timeout_us)
        return self.model.submit(request, self.receive)

    def submit_word(self, word: str) -> InferJob:
        """Submit what a word of a script says: `a1` is of sequence a, `a1+` starts it, `a1-` ends it, `a1+-` is all."""
        flags = (START if "+" in word else NONE) | (END if "-" in word else NONE)
        return self.submit(word.rstrip("+-"), ord(word[0]) - ord("a") + 1, flags)

    def receive(self, response: InferResponse) -> None:
        self.answered.append(response.id)
        self.responses[response.id] = response
        if response.error is not None:
            self.errors[response.id] = response.error

    def refusal(self, of: int | str, flags: SequenceFlag = NONE, rows: int = 1) -> str:
        with pytest.raises(SluiceError) as caught:
            self.submit("refused", of, flags, rows)
        assert caught.value.code is ErrorCode.INVALID
        return caught.value.message

    def lost(self, of: int | str) -> str:
        """Return the error message of a lost sequence."""
        with pytest.raises(SluiceError) as caught:
            self.submit("refused", of)
        assert caught.value.code is ErrorCode.UNAVAILABLE
        return caught.value.message

    def value(self, name: str, output: str = "Y") -> int:
        """The one element of an output of the last response to the request of that name."""
        found = {tensor.name: tensor for tensor in self.responses[name].outputs}
        return int(found[output].array.item())


def control(job: InferJob, name: str) -> object:
    tensor = job.request.inputs[name]
    assert tensor.shape == (1, 1)
    return tensor.array.item()


class Computed(Instance):
    """Runs a function on every batch, in the loop's next turn; the test may look at the batches."""

    def __init__(self, compute: Callable[[list[InferJob]], None], name: str = "computed") -> None:
        self.name = name
        self.batches: list[list[InferJob]] = []
        self.num_starts = 1
        self.is_up = True
        self.compute = compute

    @property
    def is_ready(self) -> bool:
        return self.is_up

    def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        self.batches.append(jobs)
        asyncio.get_running_loop().call_soon(self._run, jobs, done)

    def _run(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        self.compute(jobs)
        done()

    async def close(self) -> None:
        pass


class Process(HeldInstance):
    """An instance whose process may die, and is started again when the test says so."""

    def __init__(self, name: str = "sums_0") -> None:
        super().__init__(name)
        self.num_starts = 1

    def die(self) -> None:
        """Fail what it runs."""
        self.is_up = False
        if self._running is not None:
            jobs, done = self._running
            self._running = None
            for job in jobs:
                job.fail(SluiceError(ErrorCode.INTERNAL, "not healthy"))
            done()

    def give_back(self, job: InferJob) -> None:
        """Return one job of the batch to its scheduler, to run again."""
        assert self._running is not None
        jobs, done = self._running
        self._running = ([each for each in jobs if each is not job], done)
        job.reschedule()

    def come_back(self) -> None:
        self.num_starts += 1
        self.is_up = True
