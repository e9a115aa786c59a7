"""Requests over gRPC, to a real server."""

import asyncio

import pytest

from sluice.load.config import ApiKind, LoadConfigError
from sluice.load.run import Run, run_load
from sluice.load.stream import FailureKind
from tests.load.scripted_server import load_config
from tests.server_process import MODEL, ServerProcess


def run_on(server: ServerProcess, api: ApiKind, **settings: object) -> Run:
    url = f"http://{server.grpc_address}"
    return asyncio.run(run_load(load_config(url, api=api, model=settings.pop("model", MODEL), **settings)))


def test_streams_of_a_language_model(server: ServerProcess) -> None:
    run = run_on(server, ApiKind.GRPC_STREAM, num_requests=4, concurrency=2)
    assert run.summary.failures == {}
    assert [result.output_tokens for result in run.results] == [3] * 4
    assert all(result.output_tokens_counted_by == "usage" for result in run.results)
    assert all(result.ttft_s is not None and 0 < result.ttft_s <= result.e2e_s for result in run.results)


def test_clients_that_leave_cancel_their_calls_alone(server: ServerProcess) -> None:
    run = run_on(server, ApiKind.GRPC_STREAM, num_requests=6, concurrency=3, cancelled_share=0.5, seed=1)
    assert run.summary.failures == {}
    assert run.summary.num_left + run.summary.num_served == 6
    assert 0 < run.summary.num_left < 6


def test_what_the_server_refuses_is_a_failure_with_its_words(server: ServerProcess) -> None:
    # Every optional input of the language model is drawn at random, also those that its runtime does not have.
    (result,) = run_on(server, ApiKind.GRPC_INFER).results
    assert result.failure is not None
    assert (result.failure.kind, result.failure.label) == (FailureKind.GRPC, "grpc_UNIMPLEMENTED")
    assert result.failure.detail


def test_a_model_that_is_not_there_ends_the_run(server: ServerProcess) -> None:
    with pytest.raises(LoadConfigError, match="nowhere"):
        run_on(server, ApiKind.GRPC_STREAM, model="nowhere")
