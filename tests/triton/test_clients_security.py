"""Mutual TLS and API keys of a whole server, with tritonclient."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.paths import CERTIFICATES
from tests.server_process import ServerProcess
from tests.triton.clients import GRPC, Library
from tests.triton.onnx_models import write_scale
from tests.triton.server import serving
from tests.waiting import PATIENCE_S

KEY = {"authorization": "Bearer sesame"}
ROOT = {"ssl": True, "root_certificates": str(CERTIFICATES / "ca.pem")}
OWN = {"private_key": str(CERTIFICATES / "client.key"), "certificate_chain": str(CERTIFICATES / "client.pem")}
FILES = {"server-cert": "server.pem", "server-key": "server.key", "root-cert": "ca.pem"}
VALUES = np.ones((1, 4), np.float32)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Mutual TLS and an API key."""
    folder = tmp_path_factory.mktemp("secure")
    write_scale(folder / "models" / "scale")
    tls = [f"--grpc-{option}={CERTIFICATES / name}" for option, name in FILES.items()]
    flags = ("--grpc-use-ssl-mutual=true", *tls, "--api-key=sesame")
    with serving(folder / "models", folder / "log", *flags) as server:
        yield server


@pytest.mark.parametrize("settings", [{}, ROOT], ids=["no TLS", "no certificate of its own"])
def test_mutual_tls_is_not_optional(guarded: ServerProcess, settings: dict[str, Any]) -> None:
    with GRPC.client(guarded, **settings) as client, pytest.raises(InferenceServerException, match="UNAVAILABLE"):
        client.is_server_live(headers=KEY, client_timeout=PATIENCE_S)


def test_the_key_is_wanted(guarded: ServerProcess, library: Library) -> None:
    settings, refusal = (ROOT | OWN, "UNAUTHENTICATED") if library is GRPC else ({}, "401")
    with library.client(guarded, **settings) as client:
        for headers in (None, {"authorization": "Bearer guess"}):
            assert client.is_server_live(headers=headers)
            with pytest.raises(InferenceServerException, match=refusal):
                client.infer("scale", [library.tensor("X", VALUES)], headers=headers)
        result = client.infer("scale", [library.tensor("X", VALUES)], headers=dict(KEY))  # the HTTP library adds to it
    np.testing.assert_array_equal(result.as_numpy("Y"), VALUES * 3)
