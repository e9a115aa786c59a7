"""Texts of models that UTF-8 cannot encode, and errors without end: neither ends the process."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.python.backend import PythonBackend
from sluice.serving.model import Model, infer_one
from tests.serving.backends.builders import Lookup
from tests.serving.backends.python.parts import (
    TEXT,
    ask,
    children,
    context,
    loaded,
    text_request,
    write_model,
)

PATH = r"cannot open /data/caf\udce9.wav"
"""What is told of a file whose name is not UTF-8."""
SAYS = """
ODD = "cannot open " + os.fsdecode(b"/data/caf\\xe9.wav")

class Silent(Exception):
    def __str__(self):
        raise ValueError("nothing to say")

def down(depth):
    return up(depth + 1)

def up(depth):
    return down(depth + 1)

class TritonPythonModel:
    def execute(self, requests):
        return [getattr(self, text_of(each))() for each in requests]

    def pid(self):
        return text(os.getpid())

    def error(self):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(ODD, pb_utils.TritonError.NOT_FOUND))

    def error_of_bytes(self):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(b"cannot open caf\\xe9.wav"))

    def raised(self):
        raise OSError(ODD)

    def logged(self):
        pb_utils.Logger.log_error(ODD)
        return text("said")

    def printed(self):
        print(ODD, flush=True)
        return text("said")

    def silent(self):
        raise Silent

    def recursion(self):
        return down(0)

    def parameter(self):
        return pb_utils.InferenceResponse(parameters={"path": ODD})

    def key(self):
        return pb_utils.InferenceResponse(parameters={ODD: 1})

    def tensor(self):
        return text(ODD)

    def tensor_name(self):
        return pb_utils.InferenceResponse([pb_utils.Tensor(ODD, np.zeros(1))])

    def called(self):
        tensor = pb_utils.Tensor("TEXT", np.array(["error"], np.object_))
        request = pb_utils.InferenceRequest(model_name="says", inputs=[tensor], requested_output_names=["TEXT"])
        return pb_utils.InferenceResponse(error=request.exec().error())

    def name_of_model(self):
        pb_utils.load_model(ODD)

    def label(self):
        pb_utils.MetricFamily("odd", ODD, pb_utils.MetricFamily.COUNTER)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def says(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Model]:
    source = write_model(tmp_path_factory.mktemp("models") / "says", SAYS, "instance_group { count: 2 }" + TEXT)
    async with loaded(source, Lookup()) as model:
        yield model


async def refusal(model: Model, text: str) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        await infer_one(model, text_request(text))
    return caught.value


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("error", PATH),
        ("error_of_bytes", r"cannot open caf\xe9.wav"),
        ("raised", f"OSError: {PATH}"),
        ("called", PATH),
        ("silent", "Silent, whose text cannot be read: ValueError"),
        ("recursion", "RecursionError: maximum recursion depth exceeded"),
        ("parameter", f"ValueError: the parameter 'path' must be text that UTF-8 can encode, not '{PATH}'"),
        ("key", "ValueError: a parameter's key must be text that UTF-8 can encode"),
        ("tensor", f"ValueError: a string of Tensor 'TEXT' must be text that UTF-8 can encode, not '{PATH}'"),
        ("tensor_name", "ValueError: the name of a Tensor must be text that UTF-8 can encode"),
        ("name_of_model", "ValueError: model_name must be text that UTF-8 can encode"),
        ("label", "ValueError: description must be text that UTF-8 can encode"),
    ],
)
async def test_only_the_request_fails(how: str, said: str, says: Model) -> None:
    before = children()
    assert said in (await refusal(says, how)).message
    assert int(await ask(says, "pid")) in before
    assert children() == before


@pytest.mark.asyncio(loop_scope="module")
async def test_an_error_keeps_its_code(says: Model) -> None:
    assert (await refusal(says, "error")).code is ErrorCode.NOT_FOUND


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("how", ["logged", "printed"])
async def test_a_line_of_the_log_is_escaped(how: str, says: Model, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert await ask(says, how) == "said"
    assert any(PATH in each.getMessage() for each in caplog.records)


@pytest.mark.asyncio(loop_scope="module")
async def test_endless_recursion_is_told_without_frames_and_logged_with_few(
    says: Model, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        message = (await refusal(says, "recursion")).message
    assert message.endswith("message: RecursionError: maximum recursion depth exceeded")
    (line,) = [each.getMessage() for each in caplog.records if "RecursionError" in each.getMessage()]
    assert "): down\n" in line
    assert "frames between them" in line
    assert len(line.splitlines()) < 50


async def test_a_completion_that_cannot_be_passed_on_is_told(tmp_path: Path) -> None:
    code = """
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                name = os.fsdecode(b'/data/caf\\xe9.wav')
                config.add_input({"name": name, "data_type": "TYPE_FP32", "dims": [1]})
                return config
        """
    with pytest.raises(SluiceError, match="surrogates not allowed"):
        await PythonBackend().complete(write_model(tmp_path / "model", code), context())
