"""The stock clients of both protocols, told apart only where their calls differ."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from tritonclient.utils import np_to_triton_dtype

from tests.server_process import ServerProcess
from tests.triton.server import http_address


@dataclass(frozen=True)
class Library:
    """`tritonclient.http` or `tritonclient.grpc`."""

    name: str
    module: ModuleType
    as_json: dict[str, bool] = field(default_factory=dict)

    @contextmanager
    def client(self, server: ServerProcess, **settings: Any) -> Iterator[Any]:
        address = http_address(server) if self.name == "http" else server.grpc_address
        client = self.module.InferenceServerClient(address, **settings)
        try:
            yield client
        finally:
            client.close()

    def ask(self, client: Any, method: str, *arguments: Any) -> Any:
        """Return the answer as JSON, whose integers gRPC writes as text."""
        return getattr(client, method)(*arguments, **self.as_json)

    def tensor(self, name: str, values: NDArray[Any], datatype: str = "", **settings: Any) -> Any:
        tensor = self.module.InferInput(name, list(values.shape), datatype or np_to_triton_dtype(values.dtype))
        tensor.set_data_from_numpy(values, **settings)
        return tensor

    def output(self, name: str, **settings: Any) -> Any:
        return self.module.InferRequestedOutput(name, **settings)


HTTP = Library("http", tritonclient.http)
GRPC = Library("grpc", tritonclient.grpc, {"as_json": True})


def text(*words: bytes) -> NDArray[np.object_]:
    return np.array(words, np.object_)
