"""Requests that the model reschedules."""

from pathlib import Path

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.python.backend import PythonInstance, create_instances, create_workers
from sluice.serving.backends.python.batch_queue import WorkerBatchQueue
from sluice.serving.backends.python.environments import WorkerLaunch
from sluice.serving.instance import place_instances
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.spec import ModelSource, build_spec
from tests.serving.backends.python.parts import DECOUPLED, TEXT, ask, context, loaded, stream, write_model

COUNTDOWN = """
class TritonPythonModel:
    def initialize(self, args):
        self.rounds = {}

    def execute(self, requests):
        return [self.answer(each) for each in requests]

    def answer(self, request):
        number = self.rounds[request.request_id()] = self.rounds.get(request.request_id(), 0) + 1
        if number < int(text_of(request)):
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
        return text(f"after {number}")
"""
STREAM = """
class TritonPythonModel:
    def initialize(self, args):
        self.left = None

    def execute(self, requests):
        for request in requests:
            self.left = (int(text_of(request)) if self.left is None else self.left) - 1
            sender = request.get_response_sender()
            if self.left:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                sender.send(text(self.left))
            else:
                sender.send(text(self.left), flags=FINAL)
                self.left = None
"""
COROUTINE = STREAM.replace("    def execute", "    async def execute")


class AgainModel(Model):
    """Gives its instance each rescheduled request again at once."""

    def __init__(self, source: ModelSource, instance: PythonInstance) -> None:
        super().__init__(source.config, build_spec(source.config, 1))
        self.instance = instance
        self.num_rounds = 0
        self.num_free = 0

    def _start(self, job: InferJob) -> None:
        def again() -> None:
            self.num_rounds += 1
            self.instance.execute([job], self._done)

        job.on_reschedule = again
        again()

    def _done(self) -> None:
        self.num_free += 1

    async def close(self) -> None:
        await self.instance.close()


async def again_model(source: ModelSource) -> AgainModel:
    placements = place_instances(source.config, 0)
    script, queue = (str(source.model_file), ""), WorkerBatchQueue(source.name)
    (worker,) = create_workers(source, placements, [WorkerLaunch()], context(), script, queue)
    await worker.start()
    return AgainModel(source, create_instances([worker], placements, [worker], can_queue_ahead=False)[0])


async def test_a_request_comes_again_until_it_is_answered(tmp_path: Path) -> None:
    model = await again_model(write_model(tmp_path / "countdown", COUNTDOWN))
    try:
        assert await ask(model, "4") == "after 4"
        assert (model.num_rounds, model.num_free) == (4, 4)
    finally:
        await model.close()


@pytest.mark.parametrize("code", [STREAM, COROUTINE])
async def test_a_stream_goes_on_over_its_rounds(tmp_path: Path, code: str) -> None:
    model = await again_model(write_model(tmp_path / "stream", code, DECOUPLED))
    try:
        assert await stream(model, "3") == ["2", "1", "0"]
        assert await stream(model, "1") == ["0"]
        assert model.num_rounds == 4
    finally:
        await model.close()


async def test_where_nobody_runs_it_again_it_fails(tmp_path: Path) -> None:
    async with loaded(write_model(tmp_path / "countdown", COUNTDOWN)) as model:
        with pytest.raises(SluiceError, match="iterative_sequence: true") as caught:
            await ask(model, "2")
        assert caught.value.code is ErrorCode.INVALID
        assert await ask(model, "1") == "after 2"


WRONG = """
class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        if text_of(request) == "flag":
            request.set_release_flags(8)
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        if text_of(request) == "raise":
            raise ValueError("not again")
        return [text("too early")]
"""


async def test_wrong_rescheduling_fails_the_request(tmp_path: Path) -> None:
    model = await again_model(write_model(tmp_path / "wrong", WRONG, TEXT))
    reasons = {
        "response": "Expected a None object in the execute function return list for reschduled request",
        "raise": "ValueError: not again",
        "flag": "Unsupported release flag provided.",
    }
    try:
        for rounds, (how, said) in enumerate(reasons.items(), start=1):
            with pytest.raises(SluiceError, match=said):
                await ask(model, how)
            assert model.num_rounds == rounds
    finally:
        await model.close()
