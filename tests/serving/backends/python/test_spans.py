"""Spans of Python models, and of the requests that they make."""

import asyncio
from pathlib import Path

from sluice.serving.model import infer_one
from tests.recordings import find_span, parents, recorded
from tests.serving.backends.builders import Lookup
from tests.serving.backends.python.parts import loaded, text_request, write_model

CALLER = """
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(each) for each in requests]

    def answer(self, request):
        tensor = pb_utils.Tensor("TEXT", np.array(["a"], np.object_))
        options = {"trace": request.trace()} if text_of(request) == "with" else {}
        asked = pb_utils.InferenceRequest(
            model_name="told", inputs=[tensor], requested_output_names=["TEXT"], **options
        )
        asked.exec()
        return text(request.trace().get_context())
"""
TOLD = """
class TritonPythonModel:
    def execute(self, requests):
        return [text("x") for _ in requests]
"""


async def test_what_a_model_asks_is_a_span_of_its_request_and_it_is_known_to_ask(tmp_path: Path) -> None:
    lookup = Lookup()
    async with (
        loaded(write_model(tmp_path / "told", TOLD), lookup) as told,
        loaded(write_model(tmp_path / "caller", CALLER), lookup) as caller,
    ):
        before = caller.calls_models
        with recorded() as recording:
            answer = await infer_one(caller, text_request("without"))
    assert (before, caller.calls_models, told.calls_models) == (False, True, False)
    assert recording.is_complete
    found = parents(recording)
    assert found["infer caller"] == "test"
    assert found["infer told"] == "infer caller"
    job = find_span(recording, "infer caller")
    assert answer.outputs[0].array.flatten()[0].decode() == f'{{"traceparent": "{job.traceparent}"}}'


async def test_a_model_that_has_several_requests_says_which_one_it_asks_for(tmp_path: Path) -> None:
    lookup = Lookup()
    async with (
        loaded(write_model(tmp_path / "told", TOLD), lookup),
        loaded(write_model(tmp_path / "caller", CALLER), lookup) as caller,
    ):

        async def ask(word: str) -> dict[str, str]:
            with recorded() as recording:
                await infer_one(caller, text_request(word))
            return parents(recording)

        found = await asyncio.gather(*(asyncio.create_task(ask("with")) for _ in range(4)))
    assert [each["infer told"] for each in found] == ["infer caller"] * 4
