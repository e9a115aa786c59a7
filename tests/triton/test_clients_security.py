"""TLS, mutual TLS and API keys with tritonclient; the health service and reflection as other tools use them."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.paths import CERTIFICATES
from tests.server_process import ServerProcess
from tests.triton.clients import GRPC, HTTP
from tests.triton.onnx_models import write_scale
from tests.triton.server import serving
from tests.waiting import PATIENCE_S

KEY = {"authorization": "Bearer sesame"}
ROOT = {"ssl": True, "root_certificates": str(CERTIFICATES / "ca.pem")}
OWN = {"private_key": str(CERTIFICATES / "client.key"), "certificate_chain": str(CERTIFICATES / "client.pem")}
VALUES = np.ones((1, 4), np.float32)


def server_flags(mutual: bool) -> list[str]:
    kind = "--grpc-use-ssl-mutual=true" if mutual else "--grpc-use-ssl=true"
    files = {"server-cert": "server.pem", "server-key": "server.key", "root-cert": "ca.pem"}
    return [kind, *(f"--grpc-{option}={CERTIFICATES / name}" for option, name in files.items())]


@pytest.fixture(scope="module")
def onnx_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secure") / "models"
    write_scale(folder / "scale")
    return folder


@pytest.fixture(scope="module")
def tls_server(onnx_repository: Path) -> Iterator[ServerProcess]:
    with serving(onnx_repository, onnx_repository.with_name("tls.log"), *server_flags(mutual=False)) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(onnx_repository: Path) -> Iterator[ServerProcess]:
    """Mutual TLS and an API key."""
    flags = (*server_flags(mutual=True), "--api-key=sesame")
    with serving(onnx_repository, onnx_repository.with_name("guarded.log"), *flags) as server:
        yield server


def test_tls(tls_server: ServerProcess) -> None:
    with GRPC.client(tls_server, **ROOT) as client:
        result = client.infer("scale", [GRPC.tensor("X", VALUES)])
    np.testing.assert_array_equal(result.as_numpy("Y"), VALUES * 3)


def test_tls_is_not_optional(tls_server: ServerProcess) -> None:
    with GRPC.client(tls_server) as client, pytest.raises(InferenceServerException, match="UNAVAILABLE"):
        client.is_server_live(client_timeout=PATIENCE_S)


def test_mutual_tls(guarded: ServerProcess) -> None:
    with GRPC.client(guarded, **ROOT, **OWN) as client:
        result = client.infer("scale", [GRPC.tensor("X", VALUES)], headers=KEY)
    np.testing.assert_array_equal(result.as_numpy("Y"), VALUES * 3)


def test_mutual_tls_wants_the_clients_certificate(guarded: ServerProcess) -> None:
    with GRPC.client(guarded, **ROOT) as client, pytest.raises(InferenceServerException, match="UNAVAILABLE"):
        client.is_server_live(headers=KEY, client_timeout=PATIENCE_S)


@pytest.mark.parametrize("headers", [None, {"authorization": "Bearer guess"}])
def test_the_key_is_wanted_over_grpc(guarded: ServerProcess, headers: dict[str, str] | None) -> None:
    with GRPC.client(guarded, **ROOT, **OWN) as client:
        assert client.is_server_live(headers=headers)
        with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
            client.infer("scale", [GRPC.tensor("X", VALUES)], headers=headers)


@pytest.mark.parametrize("headers", [None, {"authorization": "Bearer guess"}])
def test_the_key_is_wanted_over_http(guarded: ServerProcess, headers: dict[str, str] | None) -> None:
    with HTTP.client(guarded) as client:
        assert client.is_server_live()
        with pytest.raises(InferenceServerException, match="401"):
            client.infer("scale", [HTTP.tensor("X", VALUES)], headers=headers)
        assert client.infer("scale", [HTTP.tensor("X", VALUES)], headers=KEY).as_numpy("Y").shape == (1, 4)


def test_health_service(triton: ServerProcess) -> None:
    with grpc.insecure_channel(triton.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        first = next(iter(health.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)))
        assert first.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection(triton: ServerProcess) -> None:
    with grpc.insecure_channel(triton.grpc_address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        [answer] = stub.ServerReflectionInfo(iter([question]), timeout=PATIENCE_S)
    names = {service.name for service in answer.list_services_response.service}
    assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= names
