import asyncio
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2

from gateway.options.grpc import GrpcOptions
from sluice.errors import ErrorCode, SluiceError
from tests.gateway.grpc.parts import (
    INVALID,
    EchoModel,
    FunctionModel,
    HeldModel,
    add_input,
    failure,
    infer_request,
    numbers,
    serving,
    set_parameters,
)
from tests.gateway.v2.small_service import SmallService


async def test_one_request_and_its_response() -> None:
    async with serving(SmallService(EchoModel(version=3))) as running:
        response = await running.stub.ModelInfer(infer_request("echo", 1, 2, id="r1"))
        assert (response.model_name, response.model_version, response.id) == ("echo", "3", "r1")
        assert [(each.name, each.datatype, list(each.shape)) for each in response.outputs] == [
            ("OUTPUT0", "INT32", [2])
        ]
        assert numbers(response) == [1, 2]
        assert not response.parameters


async def test_the_stock_client_without_asyncio() -> None:
    values = np.arange(16, dtype=np.float32).reshape(1, 16)

    def infer(target: str) -> Any:
        with triton.InferenceServerClient(target) as client:
            assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("echo")
            given = triton.InferInput("INPUT0", [1, 16], "FP32")
            given.set_data_from_numpy(values)
            return client.infer("echo", [given], request_id="sync").as_numpy("OUTPUT0")

    async with serving(SmallService(EchoModel(datatype="FP32", dims=(-1, -1)))) as running:
        assert np.array_equal(await asyncio.to_thread(infer, running.target), values)


async def test_the_stock_client_with_asyncio() -> None:
    texts = np.array([[b"caf\xc3\xa9", b"", b"\xff\0"]], np.object_)
    async with (
        serving(SmallService(EchoModel(datatype="BYTES", dims=(-1, -1)))) as running,
        triton_aio.InferenceServerClient(running.target) as client,
    ):
        given = triton_aio.InferInput("INPUT0", [1, 3], "BYTES")
        given.set_data_from_numpy(texts)
        result = await client.infer("echo", [given])
        assert result.as_numpy("OUTPUT0").tolist() == texts.tolist()


async def test_models_and_versions_that_are_not_there() -> None:
    async with serving(SmallService(EchoModel(version=1), EchoModel(version=2))) as running:
        infer = running.stub.ModelInfer
        assert (await infer(infer_request("echo", 1))).model_version == "2"
        assert (await infer(infer_request("echo", 1, version="1"))).model_version == "1"
        assert await failure(infer(infer_request("nope", 1))) == (
            "NOT_FOUND",
            "Request for unknown model: 'nope' is not found",
        )
        assert await failure(infer(infer_request("echo", 1, version="9"))) == (
            "NOT_FOUND",
            "Request for unknown model: 'echo' version 9 is not found",
        )
        code, message = await failure(infer(infer_request("nope", 1, version="abc")))
        assert code == INVALID and "'abc' (details: stol)" in message


async def test_a_malformed_message_is_refused_and_nothing_else_suffers() -> None:
    async with serving(SmallService(EchoModel())) as running:
        call = running.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        assert await failure(call(b"\xff\xff\xff\xff")) == ("INTERNAL", "Unable to parse request")
        assert (await failure(running.channel.unary_unary("/inference.GRPCInferenceService/Nope")(b"")))[
            0
        ] == "UNIMPLEMENTED"
        assert numbers(await running.stub.ModelInfer(infer_request("echo", 5))) == [5]


async def test_damaged_messages_never_fail_unexpectedly(caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(20)
    request = infer_request(
        "echo", 1, 2, id="x", version="1", outputs=["OUTPUT0"], parameters={"priority": 1, "a": "b"}
    )
    set_parameters(request.outputs[0].parameters, {"classification": 1})
    whole = request.SerializeToString()
    async with serving(SmallService(EchoModel())) as running:
        call = running.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for _ in range(400):
            damaged = bytearray(whole)
            for _ in range(chance.randint(1, 3)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            with suppress(grpc.RpcError):
                await call(bytes(damaged))
        assert (await running.stub.ModelInfer(request)).id == "x"
    assert "unexpectedly" not in caplog.text


async def test_a_decoupled_model_is_for_streams() -> None:
    async with serving(SmallService(EchoModel(is_decoupled=True))) as running:
        for wrong_or_not in ([], ["NOPE"]):
            message = infer_request("echo", 1, outputs=wrong_or_not)
            set_parameters(message.parameters, {"priority": "no number"} if wrong_or_not else {})
            assert await failure(running.stub.ModelInfer(message)) == (
                "UNIMPLEMENTED",
                "ModelInfer RPC doesn't support models with decoupled transaction policy",
            )


async def test_an_error_of_the_model() -> None:
    error = SluiceError(ErrorCode.ALREADY_EXISTS, "failed as asked")
    async with serving(SmallService(FunctionModel("echo", lambda job: job.fail(error)))) as running:
        assert await failure(running.stub.ModelInfer(infer_request("echo", 1))) == ("ALREADY_EXISTS", "failed as asked")


async def test_a_failure_that_nobody_expected_is_told_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    def break_down(job: Any) -> None:
        raise ZeroDivisionError("a secret")

    async with serving(SmallService(FunctionModel("echo", break_down))) as running:
        code, message = await failure(running.stub.ModelInfer(infer_request("echo", 1)))
    assert code == "INTERNAL" and "a secret" not in message
    reference = message.rsplit(" ", 1)[1]
    assert reference in caplog.text and "a secret" in caplog.text


async def test_when_to_try_again() -> None:
    error = SluiceError(ErrorCode.OVERLOADED, "too much", retry_after_s=2.5)
    async with serving(SmallService(FunctionModel("echo", lambda job: job.fail(error)))) as running:
        call = running.stub.ModelInfer(infer_request("echo", 1))
        assert await failure(call) == ("RESOURCE_EXHAUSTED", "too much")
        assert dict(await call.trailing_metadata())["grpc-retry-pushback-ms"] == "2500"


async def test_a_client_that_cancels() -> None:
    model = HeldModel()
    async with serving(SmallService(model)) as running:
        call = running.stub.ModelInfer(infer_request("held", 1, id="left"))
        await asyncio.wait([asyncio.ensure_future(model.until(lambda: len(model.jobs) == 1))])
        call.cancel()
        await model.until(lambda: model.cancelled == ["left"])
        assert model.num_in_flight == 0


async def test_a_deadline_cancels_the_request() -> None:
    model = HeldModel()
    async with serving(SmallService(model)) as running:
        call = running.stub.ModelInfer(infer_request("held", 1, id="late"), timeout=0.1)
        assert (await failure(call))[0] == "DEADLINE_EXCEEDED"
        await model.until(lambda: model.cancelled == ["late"])


async def test_a_message_of_sixty_megabytes() -> None:
    raw = bytes(60_000_000)
    request = service_pb2.ModelInferRequest(model_name="echo")
    add_input(request, "UINT8", [len(raw)], raw)
    async with serving(SmallService(EchoModel(datatype="UINT8"))) as running:
        response = await running.stub.ModelInfer(request)
    assert len(response.raw_output_contents[0]) == len(raw)


async def test_a_message_over_the_limit() -> None:
    options = GrpcOptions(port=0, max_input_bytes=10_000)
    async with serving(SmallService(EchoModel()), options) as running:
        code, message = await failure(running.stub.ModelInfer(infer_request("echo", *range(5000))))
        assert code == "RESOURCE_EXHAUSTED" and "10000" in message
        assert numbers(await running.stub.ModelInfer(infer_request("echo", 1))) == [1]


async def test_a_traced_request(tmp_path: Path) -> None:
    service = SmallService(EchoModel())
    service.trace = type(service.trace)(str(tmp_path / "trace.json"))
    service.trace.update({"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "1"})
    async with serving(service) as running:
        await running.stub.ModelInfer(infer_request("echo", 1, id="traced"))
        await running.stub.ModelInfer(infer_request("echo", 1, id="not traced"))
    text = (tmp_path / "trace.json.0").read_text()
    assert '"request_id":"traced"' in text and "not traced" not in text
    for point in ("GRPC_WAITREAD_END", "REQUEST_START", "REQUEST_END", "GRPC_SEND_START"):
        assert text.count(f'"{point}"') == 1


async def test_requests_side_by_side_on_one_connection() -> None:
    model = HeldModel()
    async with serving(SmallService(model)) as running:
        calls = [running.stub.ModelInfer(infer_request("held", 1, id=str(number))) for number in range(20)]
        waiting = asyncio.gather(*calls)
        await model.until(lambda: len(model.jobs) == 20)
        for number in reversed(range(20)):
            model.send(str(number), number, is_final=True)
        assert [numbers(response) for response in await waiting] == [[number] for number in range(20)]
