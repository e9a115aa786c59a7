"""tritonclient's gRPC streams, and requests that clients cancel."""

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
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


def is_final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def test_a_decoupled_model_answers_many_times(triton: ServerProcess) -> None:
    with streaming(triton) as (client, answers):
        client.async_stream_infer("text_repeat", repeat(b"a b c", 5), request_id="five")
        arrived = [answers.next() for _ in range(5)]
        client.stop_stream()
    assert [result.as_numpy("text_output")[0] for result in arrived] == [b"a", b"b", b"c", b"a", b"b"]
    assert [int(result.as_numpy("index")[0]) for result in arrived] == list(range(5))
    assert {result.get_response().id for result in arrived} == {"five"}
    assert answers.is_empty


def test_the_end_can_be_asked_for(triton: ServerProcess) -> None:
    with streaming(triton) as (client, answers):
        client.async_stream_infer("text_repeat", repeat(b"a", 2), enable_empty_final_response=True)
        arrived = [answers.next() for _ in range(3)]
        client.stop_stream()
    assert [is_final(result) for result in arrived] == [False, False, True]
    assert len(arrived[-1].get_response().outputs) == 0


def test_requests_share_a_stream(triton: ServerProcess) -> None:
    with streaming(triton) as (client, answers):
        for number in range(8):
            client.async_stream_infer("text_repeat", repeat(b"w", 16), request_id=str(number))
        arrived = [answers.next().get_response() for _ in range(8 * 16)]
        client.stop_stream()
    for number in range(8):
        positions = [int.from_bytes(r.raw_output_contents[1], "little") for r in arrived if r.id == str(number)]
        assert positions == list(range(16))


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
            client.async_stream_infer(
                "sequence_accum",
                [GRPC.tensor("INPUT", np.array([[number]], np.int32))],
                sequence_id=99,
                sequence_start=number == 1,
                sequence_end=number == 5,
            )
        sums = [int(answers.next().as_numpy("SUM")[0, 0]) for _ in range(5)]
        client.stop_stream()
    assert sums == [1, 3, 6, 10, 15]


def test_an_error_ends_its_request_and_not_the_stream(triton: ServerProcess) -> None:
    with streaming(triton) as (client, answers):
        client.async_stream_infer("nope", repeat(b"a", 1))
        assert "unknown model: 'nope'" in str(answers.next_error())
        client.async_stream_infer("text_repeat", repeat(b"ERR b", 2))
        assert "asked to fail" in str(answers.next_error())
        assert answers.next().as_numpy("text_output")[0] == b"b"
        client.stop_stream()


def test_a_stream_that_is_cancelled_reaches_the_model(triton: ServerProcess, hold: Hold) -> None:
    with streaming(triton) as (client, answers):
        client.async_stream_infer("held_stream", hold.inputs(GRPC))
        assert answers.next().as_numpy("SAID")[0] == b"started"
        client.stop_stream(cancel_requests=True)
        hold.wait_cancelled()


def test_a_cancelled_request_reaches_the_model(triton: ServerProcess, hold: Hold) -> None:
    answers = Answers()
    with GRPC.client(triton) as client:
        request = client.async_infer("held", hold.inputs(GRPC), callback=answers.take)
        hold.wait_started()
        request.cancel()
        hold.wait_cancelled()
        assert "CANCELLED" in str(answers.next_error())


def test_a_clients_deadline_reaches_the_model(triton: ServerProcess, hold: Hold) -> None:
    with GRPC.client(triton) as client:
        with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
            client.infer("held", hold.inputs(GRPC), client_timeout=0.5)
        hold.wait_cancelled()


def test_a_streams_deadline_reaches_the_model(triton: ServerProcess, hold: Hold) -> None:
    with streaming(triton, stream_timeout=0.5) as (client, answers):
        client.async_stream_infer("held_stream", hold.inputs(GRPC))
        assert answers.next().as_numpy("SAID")[0] == b"started"
        assert "Deadline Exceeded" in str(answers.next_error())
        hold.wait_cancelled()


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
