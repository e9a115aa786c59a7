"""tritonclient's gRPC streams, and requests that clients cancel."""

import queue
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from tests.server_process import ServerProcess
from tests.triton.clients import GRPC, Library, text
from tests.triton.held import Hold
from tests.waiting import PATIENCE_S

Answer = tuple[Any, InferenceServerException | None]


class Answers:
    """Results that a stream's callback received."""

    def __init__(self) -> None:
        self._arrived: queue.Queue[Answer] = queue.Queue()

    def take(self, result: Any, error: InferenceServerException | None) -> None:
        self._arrived.put((result, error))

    def next(self) -> Any:
        result, error = self._arrived.get(timeout=PATIENCE_S)
        assert error is None, str(error)
        return result

    def next_error(self) -> InferenceServerException:
        _, error = self._arrived.get(timeout=PATIENCE_S)
        assert error is not None
        return error

    @property
    def is_empty(self) -> bool:
        return self._arrived.empty()


@contextmanager
def streaming(server: ServerProcess, **settings: Any) -> Iterator[tuple[InferenceServerClient, Answers]]:
    answers = Answers()
    with GRPC.client(server) as client:
        client.start_stream(callback=answers.take, **settings)
        yield client, answers


def repeat(words: bytes, count: int) -> list[Any]:
    return [GRPC.tensor("text_input", text(words)), GRPC.tensor("max_tokens", np.array([count], np.int32))]


def test_decoupled_requests_share_a_stream(triton: ServerProcess) -> None:
    with streaming(triton) as (client, answers):
        for number in range(8):
            client.async_stream_infer("text_repeat", repeat(b"a b c", 16), request_id=str(number))
        arrived = [answers.next() for _ in range(8 * 16)]
        client.async_stream_infer("text_repeat", repeat(b"a", 1), enable_empty_final_response=True)
        ends = [answers.next().get_response() for _ in range(2)]
        client.stop_stream()
    for number in range(8):
        own = [each for each in arrived if each.get_response().id == str(number)]
        assert [int(each.as_numpy("index")[0]) for each in own] == list(range(16))
        assert b"".join(each.as_numpy("text_output")[0] for each in own) == b"abcabcabcabcabca"
    assert [each.parameters["triton_final_response"].bool_param for each in ends] == [False, True]
    assert not ends[1].outputs and answers.is_empty


def test_an_ordinary_model_answers_once_each(triton: ServerProcess) -> None:
    with streaming(triton, compression_algorithm="gzip") as (client, answers):
        for number in range(20):
            client.async_stream_infer("versioned", [GRPC.tensor("INPUT0", np.array([number], np.int32))])
        arrived = sorted(int(answers.next().as_numpy("OUTPUT0")[0]) for _ in range(20))
        client.stop_stream()
    assert arrived == [200 + number for number in range(20)]


def test_a_sequence_over_a_stream(triton: ServerProcess) -> None:
    with streaming(triton) as (client, answers):
        for number in range(1, 6):
            inputs = [GRPC.tensor("INPUT", np.array([[number]], np.int32))]
            ends: dict[str, Any] = {"sequence_start": number == 1, "sequence_end": number == 5}
            client.async_stream_infer("sequence_accum", inputs, sequence_id=99, **ends)
        assert [int(answers.next().as_numpy("SUM")[0, 0]) for _ in range(5)] == [1, 3, 6, 10, 15]
        client.stop_stream()


def test_an_error_ends_its_request_and_not_the_stream(triton: ServerProcess) -> None:
    with streaming(triton) as (client, answers):
        client.async_stream_infer("nope", repeat(b"a", 1))
        assert "unknown model: 'nope'" in str(answers.next_error())
        client.async_stream_infer("text_repeat", repeat(b"ERR b", 2))
        assert "asked to fail" in str(answers.next_error())
        assert answers.next().as_numpy("text_output")[0] == b"b"
        client.stop_stream()


async def test_the_asyncio_client_s_stream(triton: ServerProcess) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for name in ("one", "two"):
            yield {"model_name": "text_repeat", "inputs": repeat(b"a b", 3), "request_id": name}

    async with tritonclient.grpc.aio.InferenceServerClient(triton.grpc_address) as client:
        arrived = [result async for result, error in client.stream_infer(requests()) if error is None]
    for name in ("one", "two"):
        words = [each.as_numpy("text_output")[0] for each in arrived if each.get_response().id == name]
        assert words == [b"a", b"b", b"a"]


@pytest.mark.parametrize("ends_by", ["leaving", "its deadline"])
def test_a_stream_that_ends_reaches_the_model(triton: ServerProcess, hold: Hold, ends_by: str) -> None:
    with streaming(triton, stream_timeout=None if ends_by == "leaving" else 0.5) as (client, answers):
        client.async_stream_infer("held_stream", hold.inputs(GRPC))
        if ends_by == "leaving":
            assert answers.next().as_numpy("SAID")[0] == b"started"
            client.stop_stream(cancel_requests=True)
        else:
            hold.wait_started()
        hold.wait_cancelled()


@pytest.mark.parametrize("ends_by", ["leaving", "its deadline"])
def test_a_request_that_ends_reaches_the_model(triton: ServerProcess, hold: Hold, ends_by: str) -> None:
    answers = Answers()
    timeout = None if ends_by == "leaving" else 0.5
    with GRPC.client(triton) as client:
        request = client.async_infer("held", hold.inputs(GRPC), callback=answers.take, client_timeout=timeout)
        hold.wait_started()
        if ends_by == "leaving":
            request.cancel()
        hold.wait_cancelled()
        assert ("CANCELLED" if ends_by == "leaving" else "Deadline Exceeded") in str(answers.next_error())


def test_an_answer_may_be_awaited_long(triton: ServerProcess, hold: Hold, library: Library) -> None:
    def ask() -> Any:
        with library.client(triton) as client:
            return client.infer("held", hold.inputs(library))

    with ThreadPoolExecutor(1) as pool:
        # A thread, as the HTTP library's `async_infer` sends nothing while its caller sleeps.
        asked = pool.submit(ask)
        hold.wait_started()
        hold.release()
        assert asked.result().as_numpy("SAID")[0] == b"released"
