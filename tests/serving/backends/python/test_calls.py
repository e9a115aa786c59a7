"""Models that call other models (business logic scripting)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from sluice.errors import SluiceError
from sluice.serving.model import ResponseStream, infer_one
from sluice.serving.statistics import FailureReason
from tests.serving.backends.builders import Lookup
from tests.serving.backends.python.parts import (
    ARRAY,
    DECOUPLED,
    TEXT,
    array_request,
    ask,
    loaded,
    stream,
    text_request,
    write_model,
)
from tests.waiting import until

SHOUT = """
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(text_of(request), request) for request in requests]

    def answer(self, word, request):
        if word == "fail":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND))
        if word == "exit":
            os._exit(1)
        return text(word.upper() + json.loads(request.parameters()).get("mark", ""))
"""
COUNT = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.count, args=(request, request.get_response_sender())).start()

    def count(self, request, sender):
        for number in range(int(text_of(request))):
            sender.send(text(number))
        while text_of(request) in ("0", "1") and not request.is_cancelled():
            time.sleep(0.001)
        sender.send(flags=FINAL)
"""
CALLER = """
import asyncio

def request(word, model="shout", **options):
    tensor = pb_utils.Tensor("TEXT", np.array([word], np.object_))
    return pb_utils.InferenceRequest(model_name=model, inputs=[tensor], requested_output_names=["TEXT"], **options)

def said(response):
    if not response.has_error() and not response.output_tensors():
        return "the end"
    if response.has_error():
        return f"<{response.error().code().name} {response.error().message()}>"
    return pb_utils.get_output_tensor_by_name(response, "TEXT").as_numpy().flatten()[0].decode()

class TritonPythonModel:
    def execute(self, requests):
        return [text(getattr(self, text_of(each))()) for each in requests]

    def one(self):
        return said(request("a", parameters={"mark": "!"}).exec())

    def several(self):
        words = {}
        def ask(number):
            words[number] = said(request(f"w{number}").exec())
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        return [words[number] for number in range(20)]

    def coroutines(self):
        async def ask():
            return await asyncio.gather(*(request(f"w{number}").async_exec() for number in range(5)))
        return [said(each) for each in asyncio.run(ask())]

    def errors(self):
        asked = [request("fail"), request("x", "nobody"), request("exit"), request("3", "count")]
        return [said(each.exec()).split(".")[0] for each in asked]

    def count(self):
        return [said(each) for each in request("3", "count").exec(decoupled=True)]

    def begin(self):
        responses = request("1", "count").exec(decoupled=True)
        return said(next(responses))

    def nameless(self):
        return pb_utils.InferenceRequest(model_name="", inputs=[], requested_output_names=[])

    def forked(self):
        reading, writing = os.pipe()
        if os.fork() == 0:
            try:
                said(request("a").exec())
            except pb_utils.TritonModelException as error:
                os.write(writing, str(error).encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as pipe:
            return pipe.read()

    def bytes(self):
        name = np.array(["shout"], np.object_).astype(bytes)[0]
        tensor = pb_utils.Tensor(b"TEXT", np.array(["a"], np.object_))
        asked = pb_utils.InferenceRequest(b"id", inputs=[tensor], requested_output_names=[b"TEXT"], model_name=name)
        return said(asked.exec())

    def wrong(self):
        tried = [
            {"correlation_id": 1.5}, {"correlation_id": -1}, {"model": 5}, {"request_id": 5}, {"flags": "1"},
            {"timeout": 2**64}, {"model_version": "1"}, {"parameters": {"a": [1]}}, {"parameters": {"a": 2**70}},
            {"parameters": [1]}, {"request_id": None}, {"correlation_id": None}, {"flags": None},
        ]
        reasons = []
        for options in tried:
            try:
                request("x", **options)
            except (TypeError, ValueError, pb_utils.TritonModelException) as error:
                reasons.append(str(error))
        made = [
            {"model_name": "shout", "inputs": [np.zeros(1)], "requested_output_names": []},
            {"model_name": "shout", "inputs": [None], "requested_output_names": []},
            {"model_name": "shout", "inputs": []},
            {"requested_output_names": []},
            {"model_name": None, "inputs": [], "requested_output_names": []},
        ]
        for options in made:
            try:
                pb_utils.InferenceRequest(**options)
            except (TypeError, pb_utils.TritonModelException) as error:
                reasons.append(type(error).__name__ + " " + str(error))
        return "|".join(reasons)

    def itself(self):
        return said(request("one", "caller").exec())

    def nested(self):
        return said(request("itself", "caller").exec())

    def many(self):
        async def ask():
            waiting = [request(f"w{number}", "together").async_exec() for number in range(50)]
            return await asyncio.gather(*waiting)
        return len({said(each) for each in asyncio.run(ask())})

    def at_once(self):
        async def ask():
            waiting = request("w", "shout").async_exec()
            time.sleep(0.05)  # the event loop does not run, and the request is on its way
            return waiting, said(await waiting)
        return asyncio.run(ask())[1]

    def async_count(self):
        async def ask():
            responses = await request("3", "count").async_exec(decoupled=True)
            return [said(each) async for each in responses] + [said(each) for each in responses]
        return asyncio.run(ask())

    def side_by_side(self):
        async def one(number):
            responses = await request(f"w{number}", "together").async_exec(decoupled=True)
            return said(next(responses))
        async def ask():
            return await asyncio.gather(*(one(number) for number in range(50)))
        return len(set(asyncio.run(ask())))

    def limited(self):
        async def ask():
            try:
                await asyncio.wait_for(request("slow", "hang").async_exec(), 0.05)
            except asyncio.TimeoutError:
                return "too late"
        return asyncio.run(ask())

    def cancel(self):
        responses = request("0", "count").exec(decoupled=True)
        ended = []
        reader = threading.Thread(target=lambda: ended.append(list(responses)))
        reader.start()
        time.sleep(0.05)
        responses.cancel()
        responses.cancel()
        reader.join(10)
        return ended, list(responses)

    def full(self):
        where = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0)
        asked = request(
            "x", "told", request_id="7", correlation_id="seq", model_version=1, timeout=5000000,
            flags=pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, parameters={"a": 1, "b": "c"},
            preferred_memory=where, trace=pb_utils.InferenceTrace(),
        )
        assert asked.preferred_memory() is where and asked.trace().get_context() is None
        return said(asked.exec())
"""
TOLD = """
class TritonPythonModel:
    def execute(self, requests):
        return [
            text([
                each.request_id(), each.correlation_id(), each.flags(), each.timeout(), each.parameters(),
                sorted(each.requested_output_names()), each.trace().get_context(), each.preferred_memory(),
            ])
            for each in requests
        ]
"""
TOGETHER = """
class TritonPythonModel:
    def initialize(self, args):
        self.waiting = []

    def execute(self, requests):
        self.waiting += [(text_of(each), each.get_response_sender()) for each in requests]
        if len(self.waiting) == 50:
            for word, sender in self.waiting:
                sender.send(text(word), flags=FINAL)
            self.waiting.clear()
"""
"""Model that responds to nobody before it has fifty requests."""
HANG = """
class TritonPythonModel:
    def execute(self, requests):
        while not requests[0].is_cancelled():
            time.sleep(0.001)
        return [text("cancelled")]
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def called(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lookup]:
    """Models that are called, and the one that calls them."""
    lookup, folder = Lookup(), tmp_path_factory.mktemp("models")
    sources = {"shout": SHOUT, "count": COUNT, "told": TOLD, "together": TOGETHER, "hang": HANG, "caller": CALLER}
    async with AsyncExitStack() as stack:
        for name, code in sources.items():
            source = write_model(folder / name, code, DECOUPLED if name == "count" else TEXT)
            await stack.enter_async_context(loaded(source, lookup))
        yield lookup


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("one", "A!"),
        ("bytes", "A"),
        ("several", str([f"W{number}" for number in range(20)])),
        ("coroutines", str([f"W{number}" for number in range(5)])),
        ("count", "['0', '1', '2', 'the end']"),
        ("async_count", str(["0", "1", "2", "the end"] * 2)),
        ("at_once", "W"),
        ("forked", "a process that the model has forked cannot ask the server"),
        ("many", "50"),
        ("side_by_side", "50"),
        ("full", str(["7", "seq", 1, 5000000, '{"a":1,"b":"c"}', ["TEXT"], None, None])),
    ],
)
async def test_a_model_calls_others(called: Lookup, what: str, said: str) -> None:
    for _ in range(2):
        assert await ask(called.models["caller"], what) == said


@pytest.mark.asyncio(loop_scope="module")
async def test_errors_of_called_models(called: Lookup) -> None:
    assert await ask(called.models["caller"], "errors") == str(
        [
            "<NOT_FOUND no>",
            "<NOT_FOUND Model nobody - Error when running inference: Request for unknown model: 'nobody' is not found>",
            "<INTERNAL Stub process 'shout_0' is not healthy",
            "<UNSUPPORTED Model count - Error when running inference: Model count is using the decoupled",
        ]
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_needs_a_models_name(called: Lookup) -> None:
    with pytest.raises(SluiceError, match="InferenceRequest takes a model_name"):
        await ask(called.models["caller"], "nameless")


@pytest.mark.asyncio(loop_scope="module")
async def test_what_cannot_be_asked_is_told_where_it_is_made(called: Lookup) -> None:
    assert (await ask(called.models["caller"], "wrong")).split("|") == [
        "Correlation ID must be integer or string",
        f"correlation_id is from 0 to {2**64 - 1}, not -1",
        "model_name is a str, not int",
        "request_id is a str, not int",
        "flags is an int, not str",
        f"timeout is from 0 to {2**64 - 1}, not {2**64}",
        "model_version is an int, not str",
        "Expect parameters values to have type bool/int/str, found type <class 'list'>",
        f"a is from {-(2**63) + 1} to {2**64 - 1}, not {2**70}",
        "Expect parameters to be a dict, got <class 'list'>",
        "request_id is a str, not NoneType",
        "correlation_id is an int, not NoneType",
        "flags is an int, not NoneType",
        "TypeError inputs are a list of Tensor, and ndarray is found",
        "TritonModelException inputs are a list of Tensor, and None is found",
        "TypeError InferenceRequest takes requested_output_names, too",
        "TypeError InferenceRequest takes inputs, model_name, too",
        "TypeError model_name is a str, not NoneType",
    ]


async def test_a_model_asks_itself_where_it_has_instances_for_it(tmp_path: Path) -> None:
    lookup = Lookup()
    source = write_model(tmp_path / "caller", CALLER, "instance_group { count: 3 }" + TEXT)
    async with (
        loaded(write_model(tmp_path / "shout", SHOUT), lookup),
        loaded(source, lookup) as caller,
    ):
        assert await ask(caller, "itself") == "A!"
        assert await ask(caller, "nested") == "A!"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_coroutine_that_waits_no_longer_cancels(called: Lookup) -> None:
    hang = called.models["hang"]
    assert await ask(called.models["caller"], "limited") == "too late"
    await until(lambda: hang.num_in_flight == 0)
    assert hang.statistics.failures[FailureReason.CANCELED] == 1


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("how", "said"), [("cancel", "([[]], [])"), ("begin", "0")])
async def test_a_stream_that_is_cancelled_or_read_no_more_ends(called: Lookup, how: str, said: str) -> None:
    """One who waits for it is woken."""
    assert await ask(called.models["caller"], how) == said
    await until(lambda: called.models["count"].num_in_flight == 0)


async def test_a_model_that_is_unloaded_gets_its_calls_back(tmp_path: Path) -> None:
    """A call that will not be answered does not keep the model from finalizing."""
    code = (
        CALLER
        + """
    def wait(self):
        return said(request("slow", "hang").exec())

    def finalize(self):
        open(os.path.join(os.path.dirname(__file__), "finalized"), "w").close()
"""
    )
    lookup = Lookup()
    source = write_model(tmp_path / "caller", code)
    async with loaded(write_model(tmp_path / "hang", HANG), lookup) as hang, loaded(source, lookup) as caller:
        waiting = asyncio.ensure_future(ask(caller, "wait"))
        await until(lambda: hang.num_in_flight == 1)
        await caller.close()
        with pytest.raises(SluiceError, match="is being unloaded"):
            await waiting
        assert (source.version_folder / "finalized").exists()


async def test_the_calls_of_a_lost_worker_are_cancelled(tmp_path: Path) -> None:
    code = (
        CALLER
        + """
    def lost(self):
        self.responses = request("1", "count").exec(decoupled=True)
        next(self.responses)
        os._exit(1)
"""
    )
    lookup = Lookup()
    async with (
        loaded(write_model(tmp_path / "count", COUNT, DECOUPLED), lookup) as count,
        loaded(write_model(tmp_path / "caller", code), lookup) as caller,
    ):
        with pytest.raises(SluiceError, match="not healthy"):
            await ask(caller, "lost")
        await until(lambda: count.num_in_flight == 0)


async def test_large_tensors_go_along(tmp_path: Path) -> None:
    double = """
        class TritonPythonModel:
            def execute(self, requests):
                y = lambda request: pb_utils.Tensor("Y", request.inputs()[0].as_numpy() * 2)
                return [pb_utils.InferenceResponse([y(request)]) for request in requests]
    """
    through = """
        class TritonPythonModel:
            def execute(self, requests):
                return [
                    pb_utils.InferenceRequest(
                        model_name="double", inputs=[request.inputs()[0]], requested_output_names=["Y"]
                    ).exec()
                    for request in requests
                ]
    """
    lookup = Lookup()
    async with (
        loaded(write_model(tmp_path / "double", double, ARRAY), lookup),
        loaded(write_model(tmp_path / "through", through, ARRAY), lookup) as model,
    ):
        for shape in ((2, 2), (300, 300), (2000, 1000)):
            array = np.full(shape, 3, np.float32)
            answers = await asyncio.gather(*(infer_one(model, array_request(array)) for _ in range(4)))
            assert all((each.outputs[0].array == 6).all() for each in answers)


PAGES = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for _ in range(20):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy())]))
            sender.send(flags=FINAL)
"""
READER = """
class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        for model in ("pages", "nobody"):
            asked = pb_utils.InferenceRequest(
                model_name=model, inputs=request.inputs(), requested_output_names=["Y"]
            )
            responses = asked.exec(decoupled=True)
            next(responses)
            responses.cancel()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([[self.mapped()]], np.float32))])]

    def mapped(self):
        with open("/proc/self/maps") as maps:
            return sum("sluice-tensor" in line for line in maps)
"""


async def test_what_nobody_has_read_takes_no_memory(tmp_path: Path) -> None:
    lookup = Lookup()
    pages = write_model(tmp_path / "pages", PAGES, "model_transaction_policy { decoupled: true }" + ARRAY)
    async with loaded(pages, lookup), loaded(write_model(tmp_path / "reader", READER, ARRAY), lookup) as reader:
        array = np.ones((300, 300), np.float32)
        mapped = [(await infer_one(reader, array_request(array))).outputs[0].array[0, 0] for _ in range(30)]
        assert max(mapped[10:]) <= max(mapped[:10]) + 5


async def test_streams_and_calls_share_a_worker(tmp_path: Path) -> None:
    code = (
        CALLER.replace("class TritonPythonModel:", "class Callers:")
        + """

class TritonPythonModel(Callers):
    def execute(self, requests):
        for each in requests:
            threading.Thread(target=self.answer, args=(each, each.get_response_sender())).start()

    def answer(self, each, sender):
        for number in range(50):
            sender.send(text(said(request(f"{text_of(each)}{number}").exec())))
        sender.send(flags=FINAL)
"""
    )
    lookup = Lookup()
    async with (
        loaded(write_model(tmp_path / "shout", SHOUT), lookup),
        loaded(write_model(tmp_path / "caller", code, DECOUPLED), lookup) as caller,
    ):
        opened = ResponseStream(caller, text_request("z"))
        opened.cancel()
        for word, answers in zip("abc", await asyncio.gather(*(stream(caller, word) for word in "abc")), strict=True):
            assert answers == [f"{word.upper()}{number}" for number in range(50)]
