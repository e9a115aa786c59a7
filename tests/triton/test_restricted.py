"""Restricted parts of the protocols, with the stock clients and OpenAI's."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.server_process import ServerProcess
from tests.triton.server import copy_models, http_address, serving

ADMIN, INFER = {"admin-key": "admin value"}, {"infer-key": "secret"}
FLAGS = (
    "--http-restricted-api=model-repository,statistics:admin-key=admin value",
    "--http-restricted-api=inference:infer-key=secret",
    "--grpc-restricted-protocol=model-repository:admin-key=admin value",
    "--grpc-restricted-protocol=inference,health:infer-key=secret",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("restricted")
    with serving(copy_models(folder / "models", ["identity"]), folder / "log", *FLAGS) as server:
        yield server


def infer(client: Any, module: Any, headers: dict[str, str] | None) -> Any:
    tensor = module.InferInput("INPUT0", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    return client.infer("identity", [tensor], headers=dict(headers or {})).as_numpy("OUTPUT0")


def test_http(server: ServerProcess) -> None:
    with tritonclient.http.InferenceServerClient(http_address(server)) as client:
        assert client.is_server_ready()
        for headers in (None, {"infer-key": "wrong"}, ADMIN):
            with pytest.raises(InferenceServerException, match="This API is restricted, expecting header 'infer-key'"):
                infer(client, tritonclient.http, headers)
        assert infer(client, tritonclient.http, INFER) is not None
        with pytest.raises(InferenceServerException, match="expecting header 'admin-key'"):
            client.get_model_repository_index()
        assert client.get_model_repository_index(headers=ADMIN)


def test_openai_is_no_side_door(server: ServerProcess) -> None:
    answer = httpx.post(f"{server.base_url}/v1/chat/completions", json={})
    assert answer.status_code == 403
    assert answer.json()["error"]["type"] == "permission_error"
    assert httpx.get(f"{server.base_url}/v1/models").status_code == 200


def test_grpc(server: ServerProcess) -> None:
    with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
        assert client.get_server_metadata()
        reason = "This protocol is restricted, expecting header 'triton-grpc-protocol-infer-key'"
        for headers in (None, INFER):
            with pytest.raises(InferenceServerException, match=reason) as caught:
                infer(client, tritonclient.grpc, headers)
            assert caught.value.status() == "StatusCode.PERMISSION_DENIED"
        prefixed = {f"triton-grpc-protocol-{name}": value for name, value in (INFER | ADMIN).items()}
        assert infer(client, tritonclient.grpc, prefixed) is not None
        assert client.is_server_live(headers=prefixed)
        assert client.get_model_repository_index(headers=prefixed)
        with pytest.raises(InferenceServerException, match="admin-key"):
            client.get_model_repository_index()
