"""Calls about the server, its models and its repository."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from gateway.grpc.unary import simple, waiting
from gateway.v2.description import index_row, model_metadata, server_metadata, statistics
from gateway.v2.service import Service
from gateway.v2.version import parse_version
from serving.backend import LoadOverrides
from serving.request import LATEST
from sluice.errors import ErrorCode, SluiceError

_FILE = "file:"


class ModelCalls:
    """What needs no more than the service: every method takes a message and gives one."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._changes: set[asyncio.Task[None]] = set()

    def handlers(self) -> dict[str, Any]:
        """By the method's name."""
        calls = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ServerMetadata": self.server_metadata,
            "ModelReady": self.model_ready,
            "ModelMetadata": self.model_metadata,
            "ModelConfig": self.model_config,
            "ModelStatistics": self.model_statistics,
        }
        waits = {
            "RepositoryIndex": self.repository_index,
            "RepositoryModelLoad": self.load,
            "RepositoryModelUnload": self.unload,
        }
        return {name: simple(name, getattr(pb, f"{name}Request"), call) for name, call in calls.items()} | {
            name: waiting(name, getattr(pb, f"{name}Request"), call) for name, call in waits.items()
        }

    def server_live(self, request: Any) -> Any:
        return pb.ServerLiveResponse(live=self._service.is_live())

    def server_ready(self, request: Any) -> Any:
        return pb.ServerReadyResponse(ready=self._service.is_ready())

    def server_metadata(self, request: Any) -> Any:
        return pb.ServerMetadataResponse(**server_metadata(self._service.identity))

    def model_ready(self, request: Any) -> Any:
        version = parse_version(request.version)
        return pb.ModelReadyResponse(ready=self._service.is_model_ready(request.name, version))

    def model_metadata(self, request: Any) -> Any:
        version = parse_version(request.version)
        model = self._service.find(request.name, version)
        models = self._service.repository.versions(request.name) if version == LATEST else [model]
        return pb.ModelMetadataResponse(**model_metadata(model, [each.version for each in models]))

    def model_config(self, request: Any) -> Any:
        model = self._service.find(request.name, parse_version(request.version))
        return pb.ModelConfigResponse(config=model.config)

    def model_statistics(self, request: Any) -> Any:
        version = parse_version(request.version)
        return pb.ModelStatisticsResponse(**statistics(self._service.repository.models(), request.name, version))

    async def repository_index(self, request: Any) -> Any:
        _refuse_repository(request)
        await self._service.repository.refresh()
        rows = [index_row(entry) for entry in self._service.repository.index(request.ready)]
        return pb.RepositoryIndexResponse(models=rows)

    async def load(self, request: Any) -> Any:
        _refuse_repository(request)
        overrides = _overrides(request.parameters)
        await self._finish(self._service.repository.load(request.model_name, overrides))
        return pb.RepositoryModelLoadResponse()

    async def unload(self, request: Any) -> Any:
        _refuse_repository(request)
        dependents = request.parameters.get("unload_dependents")
        if dependents is not None and dependents.WhichOneof("parameter_choice") != "bool_param":
            raise _invalid("invalid value type for 'unload_dependents' parameter, expected bool_param.")
        unload_dependents = dependents is not None and dependents.bool_param
        await self._finish(self._service.repository.unload(request.model_name, unload_dependents))
        return pb.RepositoryModelUnloadResponse()

    async def _finish(self, change: Coroutine[Any, Any, None]) -> None:
        """A change of the repository goes on when its client has left."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)


def _overrides(parameters: Any) -> LoadOverrides | None:
    config_json: str | None = None
    files: list[tuple[str, bytes]] = []
    for name, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if name == "config":
            _expect(name, kind, "string_param")
            config_json = value.string_param
        elif name.startswith(_FILE):
            _expect(name, kind, "bytes_param")
            files.append((name.removeprefix(_FILE), value.bytes_param))
        else:
            raise _invalid(f"unrecognized load parameter '{name}'.")
    return LoadOverrides(config_json, tuple(files)) if config_json is not None or files else None


def _expect(name: str, kind: str | None, expected: str) -> None:
    if kind != expected:
        raise _invalid(f"invalid value type for load parameter '{name}', expected {expected}.")


def _refuse_repository(request: Any) -> None:
    if request.repository_name:
        raise SluiceError(ErrorCode.UNIMPLEMENTED, "'repository_name' specification is not supported")


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)
