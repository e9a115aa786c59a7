"""Requests as models read them, responses, and the errors of invalid ones."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.instance import HostPolicy
from sluice.serving.model import Model, infer_one
from sluice.serving.request import InferRequest, SequenceFlag
from sluice.serving.tensors.tensor import Tensor
from tests.serving.backends.python.parts import (
    DECOUPLED,
    REFERENCE_MODELS,
    TEXT,
    ask,
    loaded,
    source_of,
    text_of,
    text_request,
    write_model,
)


async def test_a_reference_model_runs_unmodified() -> None:
    async with loaded(source_of(REFERENCE_MODELS / "add_sub")) as model:
        left, right = np.array([[1, 2, 3, 4]], np.float32), np.array([[10, 20, 30, 40]], np.float32)
        inputs = {"INPUT0": Tensor.of("INPUT0", left), "INPUT1": Tensor.of("INPUT1", right)}
        response = await infer_one(model, InferRequest(inputs))
    total, difference = response.outputs
    assert [total.name, difference.name] == ["OUTPUT0", "OUTPUT1"]
    np.testing.assert_array_equal(total.array, left + right)
    np.testing.assert_array_equal(difference.array, left - right)


async def test_requests_tell_what_they_carry() -> None:
    async with loaded(source_of(REFERENCE_MODELS / "params_echo")) as model:
        request = InferRequest(
            {"INPUT0": Tensor.of("INPUT0", np.array([1], np.int32))},
            id="r7",
            correlation_id="abc",
            sequence=SequenceFlag.START,
            timeout_us=5,
            parameters={"p": 2, "q": True, "s": "x", "d": 1.5},
        )
        said = json.loads(text_of(await infer_one(model, request)))
    assert said == {
        "id": "r7",
        "corr": "abc",
        "flags": 1,
        "timeout": 5,
        "params": {"p": 2, "q": True, "s": "x", "d": 1.5},
        "want": ["PARAMS"],
        "greeting": "hello",
    }


async def test_models_import_what_lies_beside_them(tmp_path: Path) -> None:
    source = write_model(
        tmp_path / "parts",
        """
        import near
        from .near import NAME

        class TritonPythonModel:
            def execute(self, requests):
                return [text(near.NAME + NAME) for _ in requests]
        """,
    )
    (tmp_path / "parts" / "1" / "near.py").write_text("NAME = 'near'")
    async with loaded(source) as model:
        assert await ask(model, "") == "nearnear"
    assert not (tmp_path / "parts" / "1" / "__pycache__").exists()


async def test_a_version_may_be_a_package(tmp_path: Path) -> None:
    source = write_model(
        tmp_path / "package",
        """
        from . import VERSION, parts
        from .parts.deep import NAME
        import shared, json

        class TritonPythonModel:
            def execute(self, requests):
                said = [VERSION, parts.__name__, NAME, shared.NAME, hasattr(json, "dumps")]
                return [text(said) for _ in requests]
        """,
    )
    version = tmp_path / "package" / "1"
    (version / "__init__.py").write_text("VERSION = 'one'")
    (version / "parts").mkdir()
    (version / "parts" / "__init__.py").write_text("")
    (version / "parts" / "deep.py").write_text("from .. import VERSION\nNAME = 'deep in ' + VERSION")
    (version / "json.py").write_text("a file of this name beside the model is not the library")
    (tmp_path / "package" / "shared.py").write_text("NAME = 'shared'")
    async with loaded(source) as model:
        assert await ask(model, "") == "['one', '1.parts', 'deep in one', 'shared', True]"


async def test_a_model_keeps_to_the_cores_of_its_policy(tmp_path: Path) -> None:
    code = """
        class TritonPythonModel:
            def execute(self, requests):
                tasks = [int(task) for task in os.listdir("/proc/self/task")]
                cores = {frozenset(os.sched_getaffinity(task)) for task in tasks}
                return [text(sorted(map(sorted, cores))) for _ in requests]
    """
    core = min(os.sched_getaffinity(0))
    policies = {"one": HostPolicy("one", frozenset({core}))}
    group = 'instance_group { kind: KIND_CPU host_policy: "one" }'
    async with loaded(write_model(tmp_path / "bound", code, group + TEXT), host_policies=policies) as model:
        assert await ask(model, "") == f"[[{core}]]"
    async with loaded(write_model(tmp_path / "free", code)) as model:
        assert await ask(model, "") == str([sorted(os.sched_getaffinity(0))])


async def test_only_the_requested_outputs_come(tmp_path: Path) -> None:
    source = write_model(
        tmp_path / "two",
        """
        class TritonPythonModel:
            def execute(self, requests):
                value = np.array(["x"], np.object_)
                return [pb_utils.InferenceResponse([pb_utils.Tensor(n, value) for n in "BAC"]) for _ in requests]
        """,
        TEXT.replace("output", 'output { name: "A" data_type: TYPE_STRING dims: [ 1 ] } output').replace(
            'output { name: "TEXT"', 'output { name: "B"'
        ),
    )
    async with loaded(source) as model:
        everything = await infer_one(model, text_request(""))
        some = await infer_one(model, text_request("", requested_outputs=("A",)))
    assert [each.name for each in everything.outputs] == ["B", "A"]
    assert [each.name for each in some.outputs] == ["A"]


CODES = {
    "UNKNOWN": ErrorCode.UNKNOWN,
    "INTERNAL": ErrorCode.INTERNAL,
    "NOT_FOUND": ErrorCode.NOT_FOUND,
    "INVALID_ARG": ErrorCode.INVALID,
    "UNAVAILABLE": ErrorCode.UNAVAILABLE,
    "UNSUPPORTED": ErrorCode.UNIMPLEMENTED,
    "ALREADY_EXISTS": ErrorCode.ALREADY_EXISTS,
    "CANCELLED": ErrorCode.CANCELLED,
}


async def test_errors_have_their_codes_and_exceptions_tritons_words() -> None:
    folder = REFERENCE_MODELS / "error_model"
    async with loaded(source_of(folder)) as model:

        async def error_of(code: str) -> SluiceError:
            request = InferRequest({"CODE": Tensor.of("CODE", np.array([code.encode()], np.object_))})
            with pytest.raises(SluiceError) as caught:
                await infer_one(model, request)
            return caught.value

        for name, code in CODES.items():
            error = await error_of(name)
            assert (error.code, error.message) == (code, f"failed as {name}")
        assert (await error_of("PLAIN")).code is ErrorCode.INTERNAL
        raised = await error_of("RAISE")
    line = next(
        n for n, each in enumerate((folder / "1/model.py").read_text().splitlines(), 1) if "raise pb_utils" in each
    )
    assert raised.code is ErrorCode.INTERNAL
    assert raised.message == (
        "Failed to process the request(s) for model 'error_model_0', message: TritonModelException: the model raised"
        f"\n\nAt:\n  {folder}/1/model.py({line}): execute\n"
    )


WRONG = """
class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args.pop("model_config"))
        self.args = {**args, "name": config["name"], "dims": config["input"][0]["dims"]}
        self.args["folder"] = pb_utils.get_model_dir()

    def log(self):
        pb_utils.Logger.log_verbose("verbose")
        pb_utils.Logger.log_info("information")
        pb_utils.Logger.log_warn("warning")
        pb_utils.Logger.log_error("error")
        pb_utils.Logger.log("said", pb_utils.Logger.ERROR)
        return [text("x")]

    def execute(self, requests):
        how = text_of(requests[0])
        values = {
            "none": None, "tuple": (text("x"),), "long": [text("x")] * 2, "int": [5], "item none": [None],
            "complex": lambda: pb_utils.Tensor("TEXT", np.array([1j])),
            "list": lambda: pb_utils.Tensor("TEXT", ["x"]),
            "no name": lambda: pb_utils.Tensor("", np.zeros(1)),
            "no tensor": lambda: pb_utils.InferenceResponse([5]),
            "text error": lambda: pb_utils.InferenceResponse(error="text"),
            "exit": lambda: sys.exit(4),
            "metric": lambda: pb_utils.MetricFamily("f", "d", pb_utils.MetricFamily.COUNTER),
            "odd": lambda: [pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([Odd()], np.object_))])],
            "none tensor": lambda: pb_utils.InferenceResponse([None]),
            "parameters": lambda: pb_utils.InferenceResponse(parameters={1: "a"}),
            "level": lambda: pb_utils.Logger.log("said", 1),
            "message": lambda: pb_utils.Logger.log_info(None),
            "from_dlpack": lambda: pb_utils.Tensor.from_dlpack("X", None),
            "right": [text("right")],
            "arguments": [text(json.dumps(self.args))],
            "with parameters": [pb_utils.InferenceResponse(parameters={"k": 1, "s": "t", "b": True, "d": 0.5})],
            "log": self.log,
        }
        value = values[how]
        return value() if callable(value) else value

class Odd:
    def __str__(self):
        raise ValueError("cannot be written")
"""


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("none", "the request was let go without a final response"),
        ("item none", "the request was let go without a final response"),
        ("tuple", "Expected a list in the execute return, found type '<class 'tuple'>'."),
        ("long", "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:2\n"),
        ("int", "Expected an 'InferenceResponse' object in the execute function return list, found type"),
        ("complex", "TritonModelException: NumPy dtype is not supported."),
        ("list", "TypeError: Tensor 'TEXT' takes a numpy.ndarray, not list"),
        ("no name", "TritonModelException: Tensor name cannot be an empty string."),
        ("no tensor", "TypeError: output_tensors are a list of Tensor, and int is found"),
        ("text error", "TypeError: InferenceResponse takes a TritonError as error, not str"),
        ("exit", "SystemExit: 4"),
        ("metric", "TritonModelException: Error when creating MetricFamily: the server runs without metrics"),
        ("odd", "ValueError: cannot be written"),
        ("none tensor", "TritonModelException: output_tensors are a list of Tensor, and None is found"),
        ("parameters", "TritonModelException: Expect parameters keys to have type str, found type <class 'int'>"),
        ("level", "TypeError: level is one of Logger.LogLevel, not 1"),
        ("message", "TypeError: message is a str, not NoneType"),
        ("from_dlpack", "TritonModelException: from_dlpack takes a DLPack capsule"),
    ],
)
async def test_wrong_models_are_told_and_live_on(how: str, said: str, wrong_model: Model) -> None:
    with pytest.raises(SluiceError) as caught:
        await infer_one(wrong_model, text_request(how))
    assert caught.value.code is ErrorCode.INTERNAL
    assert caught.value.message.startswith("Failed to process the request(s) for model 'wrong_0', message: ")
    assert said in caught.value.message
    assert await ask(wrong_model, "right") == "right"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wrong_model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Model]:
    async with loaded(write_model(tmp_path_factory.mktemp("models") / "wrong", WRONG)) as model:
        yield model


@pytest.mark.asyncio(loop_scope="module")
async def test_initialize_gets_tritons_arguments(wrong_model: Model) -> None:
    said = json.loads(await ask(wrong_model, "arguments"))
    folder = said["model_repository"]
    assert folder.endswith("/wrong")
    assert said == {
        "model_instance_kind": "CPU",
        "model_instance_name": "wrong_0",
        "model_instance_device_id": "0",
        "model_repository": folder,
        "model_version": "1",
        "model_name": "wrong",
        "name": "wrong",
        "dims": [1],
        "folder": f"{folder}/1",
    }


@pytest.mark.asyncio(loop_scope="module")
async def test_response_parameters_come_along(wrong_model: Model) -> None:
    response = await infer_one(wrong_model, text_request("with parameters"))
    assert response.parameters == {"k": 1, "s": "t", "b": True, "d": 0.5}


@pytest.mark.asyncio(loop_scope="module")
async def test_the_models_lines_reach_the_servers_log(wrong_model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        await ask(wrong_model, "log")
    lines = [(each.levelno, each.getMessage()) for each in caplog.records if "model.py:" in each.getMessage()]
    assert [level for level, _ in lines] == [10, 20, 30, 40, 40]
    assert lines[1][1].startswith("[wrong_0 model.py:")
    assert lines[1][1].endswith("] information")


async def test_one_bad_batch_fails_all_its_requests_and_one_bad_response_only_its_own(tmp_path: Path) -> None:
    source = write_model(
        tmp_path / "batch",
        """
        class Odd:
            def __str__(self):
                raise ValueError("odd")

        class TritonPythonModel:
            def execute(self, requests):
                words = [text_of(request) for request in requests]
                if "raise" in words:
                    raise ValueError(f"{len(words)} requests")
                odd = pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([[Odd()]], np.object_))])
                return [odd if word == "odd" else text([word]) for word in words]
        """,
        "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 100000 preferred_batch_size: 2 }" + TEXT,
    )

    async def batch(*words: str) -> list[str]:
        requests = [InferRequest({"TEXT": Tensor.of("TEXT", np.array([[word]], np.object_))}) for word in words]
        answers = await asyncio.gather(*(infer_one(model, each) for each in requests), return_exceptions=True)
        return [each.message if isinstance(each, SluiceError) else "fine" for each in answers]

    async with loaded(source) as model:
        both = await batch("raise", "fine")
        assert all("ValueError: 2 requests" in each for each in both)
        odd, fine = await batch("odd", "fine")
        assert "ValueError: odd" in odd
        assert fine == "fine"


async def test_coroutines_are_awaited(tmp_path: Path) -> None:
    code = """
        import asyncio

        class TritonPythonModel:
            async def execute(self, requests):
                await asyncio.sleep(0)
                if text_of(requests[0]) == "fail":
                    raise ValueError("failed")
                return [text("done") for _ in requests]
    """
    async with loaded(write_model(tmp_path / "async", code)) as model:
        assert await ask(model, "") == "done"
        with pytest.raises(SluiceError, match="ValueError: failed"):
            await ask(model, "fail")


async def test_a_decoupled_coroutine_lets_the_next_batch_begin(tmp_path: Path) -> None:
    code = """
        import asyncio

        class TritonPythonModel:
            def initialize(self, args):
                self.second = None

            async def execute(self, requests):
                for request in requests:
                    self.second = self.second or asyncio.Event()
                    sender = request.get_response_sender()
                    if text_of(request) == "first":
                        await self.second.wait()
                    elif text_of(request) == "fail":
                        raise ValueError("failed")
                    self.second.set()
                    sender.send(text(text_of(request)), FINAL)
    """
    from tests.serving.backends.python.parts import stream

    async with loaded(write_model(tmp_path / "async", code, DECOUPLED)) as model:
        first = asyncio.ensure_future(stream(model, "first"))
        (failure,) = await stream(model, "fail")
        assert "ValueError: failed" in failure
        assert await stream(model, "second") == ["second"]
        assert await first == ["first"]
