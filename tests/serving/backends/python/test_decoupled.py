"""Response senders: from within `execute`, from threads, after it has returned."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sluice.serving.job import InferJob
from sluice.serving.model import Model, infer_one
from sluice.serving.request import InferResponse
from tests.serving.backends.builders import infer_stream
from tests.serving.backends.python.parts import (
    DECOUPLED,
    TEXT,
    ask,
    loaded,
    stream,
    text_of,
    text_request,
    write_model,
)
from tests.waiting import until

SPOKEN = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            if text_of(request) == "return":
                return [text("x")]
            self.answer(text_of(request), request.get_response_sender(), request)

    def answer(self, word, sender, request):
        error = lambda: pb_utils.InferenceResponse(error=pb_utils.TritonError("asked to fail"))
        if word == "many":
            for number in range(1000):
                sender.send(text(number))
            sender.send(flags=FINAL)
        elif word == "error between":
            sender.send(text("a")); sender.send(error()); sender.send(text("c"), FINAL)
        elif word == "error last":
            sender.send(error(), FINAL)
        elif word == "raise":
            sender.send(text("a")); raise ValueError("raised")
        elif word == "drop":
            sender.send(text("a"))
        elif word == "two senders":
            other = request.get_response_sender()
            sender.send(text("a")); other.send(text("b")); sender.send(flags=FINAL)
            self.refused(lambda: other.send(text("c")))
        else:
            self.refusals = []
            self.refused(lambda: sender.send())
            self.refused(lambda: sender.send(text("a"), 2))
            self.refused(lambda: sender.send(5))
            sender.send(text("fine"), FINAL)
            self.refused(lambda: sender.send(text("late")))
            self.refused(lambda: sender.send(flags=FINAL))

    def refused(self, call):
        try:
            call()
        except (pb_utils.TritonModelException, TypeError):
            return
        os._exit(1)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def spoken(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Model]:
    async with loaded(write_model(tmp_path_factory.mktemp("models") / "spoken", SPOKEN, DECOUPLED)) as model:
        yield model


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("many", [str(number) for number in range(1000)]),
        ("error between", ["a", "<asked to fail>", "c"]),
        ("error last", ["<asked to fail>"]),
        ("two senders", ["a", "b"]),
        ("refusals", ["fine"]),
    ],
)
async def test_responses_come_in_order_and_end(spoken: Model, word: str, said: list[str]) -> None:
    assert await stream(spoken, word) == said


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("raise", "ValueError: raised"),
        ("return", "is using the decoupled mode and the execute function must return None."),
        ("drop", "the request was let go without a final response"),
    ],
)
async def test_what_the_model_leaves_open_ends_in_an_error(spoken: Model, word: str, reason: str) -> None:
    *said, error = await stream(spoken, word)
    assert said == ["a"] * (word != "return")
    assert reason in error


THREADS = """
class TritonPythonModel:
    def initialize(self, args):
        self.kept = []
        self.turn = threading.Barrier(2)

    def execute(self, requests):
        for request in requests:
            self.kept.append(request)
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        sender, word = request.get_response_sender(), text_of(request)
        for number in range(100):
            self.turn.wait(timeout=20)
            sender.send(text(f"{word}{number}"))
        sender.send(flags=FINAL)
"""


async def test_threads_of_several_requests_answer_side_by_side(tmp_path: Path) -> None:
    async with loaded(write_model(tmp_path / "threads", THREADS, DECOUPLED)) as model:
        answers = await asyncio.gather(stream(model, "a"), stream(model, "b"))
    assert list(answers) == [[f"{word}{number}" for number in range(100)] for word in "ab"]


async def test_nothing_is_lost_of_many_streams(tmp_path: Path) -> None:
    code = """
        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    threading.Thread(target=self.answer, args=(request,)).start()

            def answer(self, request):
                sender = request.get_response_sender()
                for number in range(128):
                    sender.send(text(number))
                sender.send(flags=FINAL)
    """
    expected = [str(number) for number in range(128)]
    async with loaded(write_model(tmp_path / "many", code, DECOUPLED)) as model:
        for said in await asyncio.gather(*(stream(model, "") for _ in range(32))):
            assert said == expected


CANCELLED = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request, request.get_response_sender())).start()

    def answer(self, request, sender):
        if text_of(request) == "wait":
            sender.send(text("begun"))
            while not (request.is_cancelled() and sender.is_cancelled()):
                time.sleep(0.001)
            self.was_cancelled = True
        else:
            sender.send(text(getattr(self, "was_cancelled", False)))
        sender.send(flags=FINAL)
"""


async def test_a_cancelled_request_is_seen_by_the_model(tmp_path: Path) -> None:
    async with loaded(write_model(tmp_path / "cancelled", CANCELLED, DECOUPLED)) as model:
        begun = infer_stream(model, text_request("wait"))
        assert text_of(await anext(begun)) == "begun"
        await begun.aclose()
        await until(lambda: model.num_in_flight == 0)
        assert await stream(model, "ask") == ["True"]


async def test_cancellation_is_seen_within_execute(tmp_path: Path) -> None:
    code = """
        class TritonPythonModel:
            def execute(self, requests):
                while text_of(requests[0]) == "wait" and not requests[0].is_cancelled():
                    time.sleep(0.001)
                return [text("done") for _ in requests]
    """
    seen: list[InferResponse] = []
    async with loaded(write_model(tmp_path / "within", code)) as model:
        job: InferJob = model.submit(text_request("wait"), seen.append)
        assert await asyncio.wait_for(asyncio.shield(_after(job)), 5)
        job.cancel()
        assert await ask(model, "go on") == "done"
        await until(lambda: job.is_finished)
    assert seen == []


async def _after(job: InferJob) -> bool:
    await until(lambda: job.on_cancel is not None)
    return True


async def test_a_model_that_is_not_decoupled_may_answer_later_by_its_sender(tmp_path: Path) -> None:
    code = """
        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    threading.Thread(target=self.answer, args=(request,)).start()
                return [None] * len(requests)

            def answer(self, request):
                sender = request.get_response_sender()
                for refused in (lambda: sender.send(flags=FINAL), None, lambda: sender.send(text("twice"))):
                    if refused is None:
                        sender.send(text("later"))
                        continue
                    try:
                        refused()
                    except pb_utils.TritonModelException:
                        continue
                    os._exit(1)
                sender.send(flags=FINAL)
    """
    async with loaded(write_model(tmp_path / "later", code, TEXT)) as model:
        for _ in range(3):
            response = await infer_one(model, text_request(""))
            assert text_of(response) == "later"
            assert response.is_final


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stream_s_job_knows_when_the_model_ran(spoken: Model) -> None:
    last: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
    job = spoken.submit(text_request("many"), lambda response: last.set_result(response) if response.is_final else None)
    await last
    assert job.started_ns <= job.compute_started_ns < job.infer_started_ns < job.infer_ended_ns
