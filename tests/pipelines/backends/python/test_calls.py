"""Models that ask other models (business logic scripting)."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from engine.errors import SluiceError
from pipelines.inference.call import ResponseStream, infer_one
from tests.pipelines.backends.python.parts import (
    ARRAY,
    DECOUPLED,
    Lookup,
    array_request,
    ask,
    eventually,
    loaded,
    stream,
    text_request,
    write_model,
)

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
        while text_of(request) == "1" and not request.is_cancelled():
            time.sleep(0.001)
        sender.send(flags=FINAL)
"""
CALLER = """
import asyncio

def request(word, model="shout", **options):
    tensor = pb_utils.Tensor("TEXT", np.array([word], np.object_))
    return pb_utils.InferenceRequest(model_name=model, inputs=[tensor], requested_output_names=["TEXT"], **options)

def said(response):
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
        return pb_utils.InferenceRequest(inputs=[], requested_output_names=[])
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("one", "A!"),
        ("several", str([f"W{number}" for number in range(20)])),
        ("coroutines", str([f"W{number}" for number in range(5)])),
        (
            "errors",
            str(
                [
                    "<NOT_FOUND no>",
                    "<NOT_FOUND Request for unknown model: 'nobody' is not found>",
                    "<INTERNAL Stub process 'shout_0' is not healthy",
                    "<UNSUPPORTED Model count is using the decoupled",
                ]
            ),
        ),
        ("count", "['0', '1', '2']"),
    ],
)
async def test_a_model_asks_others(tmp_path: Path, what: str, said: str) -> None:
    lookup = Lookup()
    async with (
        loaded(write_model(tmp_path / "shout", SHOUT), lookup),
        loaded(write_model(tmp_path / "count", COUNT, DECOUPLED), lookup),
        loaded(write_model(tmp_path / "caller", CALLER), lookup) as caller,
    ):
        for _ in range(3 if what != "errors" else 1):
            assert await ask(caller, what) == said


async def test_a_request_needs_a_models_name(tmp_path: Path) -> None:
    async with loaded(write_model(tmp_path / "caller", CALLER)) as caller:
        with pytest.raises(SluiceError, match="InferenceRequest takes a model_name"):
            await ask(caller, "nameless")


async def test_what_nobody_reads_any_more_is_cancelled(tmp_path: Path) -> None:
    lookup = Lookup()
    async with (
        loaded(write_model(tmp_path / "count", COUNT, DECOUPLED), lookup) as count,
        loaded(write_model(tmp_path / "caller", CALLER), lookup) as caller,
    ):
        assert await ask(caller, "begin") == "0"
        await eventually(lambda: count.num_in_flight == 0)


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
        await eventually(lambda: count.num_in_flight == 0)


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
