"""The service routes sequences and clients over versions that share requests."""

from collections.abc import AsyncIterator

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.service import InferenceService
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.serving.request import InferRequest
from tests.gateway.grpc.parts import EchoModel
from tests.gateway.repositories import empty_repository

HEARTBEAT_TIMEOUT_S = 5.0


@pytest.fixture
async def service() -> AsyncIterator[InferenceService]:
    metrics = GatewayMetrics()
    service = InferenceService(empty_repository(metrics), metrics, HEARTBEAT_TIMEOUT_S)
    await service.repository.start()
    for version in (1, 2):
        service.repository.add(EchoModel("echo", version=version))
    service.begin_serving()
    yield service
    await service.close()


async def test_all_of_a_sequence_goes_to_one_version(service: InferenceService) -> None:
    service.repository.set_weights("echo", {1: 1, 2: 1})
    found = service.find("echo")
    chosen = [
        {service.route_sequence(found, InferRequest({}, correlation_id=number)).version for _ in range(5)}
        for number in range(1, 41)
    ]
    assert all(len(versions) == 1 for versions in chosen)
    assert set().union(*chosen) == {1, 2}


async def test_what_says_more_than_the_sequence_is_left_alone(service: InferenceService) -> None:
    service.repository.set_weights("echo", {1: 1})
    found = service.find("echo")
    in_sequence = InferRequest({}, correlation_id=7)
    assert service.route_sequence(found, in_sequence).version == 1
    assert service.route_sequence(found, in_sequence, version=2) is found
    assert service.route_sequence(found, in_sequence, key="client") is found
    assert service.route_sequence(found, InferRequest({})) is found


async def test_weights_of_versions_that_there_are_not(service: InferenceService) -> None:
    with pytest.raises(SluiceError, match="version 3 of model 'echo' does not serve; those that do: 1, 2") as caught:
        service.repository.set_weights("echo", {3: 1})
    assert caught.value.code is ErrorCode.INVALID
    assert not service.has_weights("echo")
