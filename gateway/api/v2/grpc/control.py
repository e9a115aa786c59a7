"""Triton's calls except inference: server, models and repository; shared memory, tracing and logging."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.grpc.messages import parse_message
from sluice.gateway.api.v2.grpc.methods import async_handler, sync_handler
from sluice.gateway.api.v2.log_settings import LOG_SETTINGS, LogValue
from sluice.gateway.api.v2.repository import (
    ADAPTER_PARAMETERS,
    BASE_MODEL,
    LoadRequest,
    build_load,
    index_rows,
    load_model,
    unload_model,
)
from sluice.gateway.api.v2.server import V2Server, model_metadata, parse_version, server_metadata
from sluice.gateway.api.v2.trace_settings import TRACE_SETTINGS, TraceValue
from sluice.serving.request import LATEST

_FILE_PREFIX = "file:"
_LOG_KINDS = {
    "log_file": ("string_param", "string"),
    "log_info": ("bool_param", "boolean"),
    "log_warning": ("bool_param", "boolean"),
    "log_error": ("bool_param", "boolean"),
    "log_verbose_level": ("uint32_param", "int32"),
    "log_format": ("string_param", "string"),
}
_LOG_FORMATS = ("default", "ISO8601")


class RepositoryCalls:
    """Calls about the server, its models and its repository. Each takes a message and returns one."""

    def __init__(self, server: V2Server) -> None:
        self._server = server
        self._changes: set[asyncio.Task[None]] = set()

    def handlers(self) -> dict[str, Any]:
        """Return the handlers by method name."""
        calls = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ServerMetadata": self.server_metadata,
            "ModelReady": self.model_ready,
            "ModelMetadata": self.model_metadata,
            "ModelConfig": self.model_config,
        }
        waits = {
            "ModelStatistics": self.model_statistics,
            "RepositoryIndex": self.repository_index,
            "RepositoryModelLoad": self.load,
            "RepositoryModelUnload": self.unload,
        }
        return {name: sync_handler(name, getattr(pb, f"{name}Request"), call) for name, call in calls.items()} | {
            name: async_handler(name, getattr(pb, f"{name}Request"), call) for name, call in waits.items()
        }

    def server_live(self, request: Any) -> Any:
        return pb.ServerLiveResponse(live=self._server.health.is_live())

    def server_ready(self, request: Any) -> Any:
        return pb.ServerReadyResponse(ready=self._server.health.is_ready())

    def server_metadata(self, request: Any) -> Any:
        return pb.ServerMetadataResponse(**server_metadata(self._server.name))

    def model_ready(self, request: Any) -> Any:
        version = parse_version(request.version)
        return pb.ModelReadyResponse(ready=self._server.is_model_ready(request.name, version))

    def model_metadata(self, request: Any) -> Any:
        version = parse_version(request.version)
        model = self._server.models.find(request.name, version)
        models = self._server.repository.versions(request.name) if version == LATEST else [model]
        return pb.ModelMetadataResponse(**model_metadata(model, [each.version for each in models]))

    def model_config(self, request: Any) -> Any:
        model = self._server.models.find(request.name, parse_version(request.version))
        return pb.ModelConfigResponse(config=model.config)

    async def model_statistics(self, request: Any) -> Any:
        version = parse_version(request.version)
        return pb.ModelStatisticsResponse(**await self._server.statistics(request.name, version))

    async def repository_index(self, request: Any) -> Any:
        _refuse_repository(request)
        return pb.RepositoryIndexResponse(models=await index_rows(self._server, request.ready))

    async def load(self, request: Any) -> Any:
        _refuse_repository(request)
        load = _parse_load(self._server, request.parameters)
        await self._finish(load_model(self._server, request.model_name, load))
        return pb.RepositoryModelLoadResponse()

    async def unload(self, request: Any) -> Any:
        _refuse_repository(request)
        dependents = request.parameters.get("unload_dependents")
        if dependents is not None and dependents.WhichOneof("parameter_choice") != "bool_param":
            raise _invalid("invalid value type for 'unload_dependents' parameter, expected bool_param.")
        unload_dependents = dependents is not None and dependents.bool_param
        base = request.parameters.get(BASE_MODEL)
        if base is not None:
            _expect(BASE_MODEL, base.WhichOneof("parameter_choice"), "string_param")
        base_model = "" if base is None else base.string_param
        await self._finish(unload_model(self._server, request.model_name, base_model, unload_dependents))
        return pb.RepositoryModelUnloadResponse()

    async def _finish(self, change: Coroutine[Any, Any, None]) -> None:
        """Await `change`, which goes on when the client disconnects."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)


def _parse_load(server: V2Server, parameters: Any) -> LoadRequest:
    adapter: dict[str, str] = {}
    config_json: str | None = None
    files: list[tuple[str, bytes]] = []
    for name, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if name == "config":
            _expect(name, kind, "string_param")
            config_json = value.string_param
        elif name in ADAPTER_PARAMETERS:
            _expect(name, kind, "string_param")
            adapter[name] = value.string_param
        elif name.startswith(_FILE_PREFIX):
            _expect(name, kind, "bytes_param")
            files.append((name.removeprefix(_FILE_PREFIX), value.bytes_param))
        else:
            raise _invalid(f"unrecognized load parameter '{name}'.")
    return build_load(server, config_json, files, adapter)


def _expect(name: str, kind: str | None, expected: str) -> None:
    if kind != expected:
        raise _invalid(f"invalid value type for load parameter '{name}', expected {expected}.")


def _refuse_repository(request: Any) -> None:
    if request.repository_name:
        raise SluiceError(ErrorCode.UNIMPLEMENTED, "'repository_name' specification is not supported")


class ExtensionCalls:
    """Calls about shared memory, tracing and logging. Each takes a message and returns one."""

    def __init__(self, server: V2Server) -> None:
        self._server = server

    def handlers(self) -> dict[str, Any]:
        """Return the handlers by method name."""
        calls = {
            "SystemSharedMemoryStatus": self.system_status,
            "SystemSharedMemoryRegister": self.system_register,
            "SystemSharedMemoryUnregister": self.system_unregister,
            "CudaSharedMemoryStatus": self.cuda_status,
            "CudaSharedMemoryRegister": self.cuda_register,
            "CudaSharedMemoryUnregister": self.cuda_unregister,
            "LogSettings": self.log_settings,
        }
        trace_setting = async_handler("TraceSetting", pb.TraceSettingRequest, self.trace_setting)
        return {name: sync_handler(name, getattr(pb, f"{name}Request"), call) for name, call in calls.items()} | {
            "TraceSetting": trace_setting
        }

    def system_status(self, request: Any) -> Any:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._server.shared_memory.status(request.name):
            found = response.regions[region.name]
            found.name, found.key = region.name, region.key
            found.offset, found.byte_size = region.offset, region.byte_size
        return response

    def system_register(self, request: Any) -> Any:
        self._server.shared_memory.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def system_unregister(self, request: Any) -> Any:
        self._server.shared_memory.unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    def cuda_status(self, request: Any) -> Any:
        name = request.name
        if not name:
            return pb.CudaSharedMemoryStatusResponse()
        reason = f"Unable to find cuda shared memory region: '{name}'"
        if any(region.name == name for region in self._server.shared_memory.status()):
            reason = f"The region named '{name}' is registered as system shared memory, not CUDA shared memory"
        raise SluiceError(ErrorCode.NOT_FOUND, reason)

    def cuda_register(self, request: Any) -> Any:
        self._server.shared_memory.require_allowed()
        reason = f"failed to register CUDA shared memory region '{request.name}': this server has no GPU to share with"
        raise _invalid(reason)

    def cuda_unregister(self, request: Any) -> Any:
        """Do nothing where it is allowed: there is no region, and an unknown one is no error."""
        self._server.shared_memory.require_allowed()
        return pb.CudaSharedMemoryUnregisterResponse()

    async def trace_setting(self, request: Any) -> Any:
        model = request.model_name or None
        if model is not None and not any(each.name == model for each in self._server.repository.models()):
            raise _invalid(f"Request for unknown model : {model}")
        sent = request.settings
        values = {name: _trace_value(name, sent[name].value) for name in TRACE_SETTINGS if name in sent}
        if values:
            self._server.trace.update(values, model)
            await self._server.settle()
        response = pb.TraceSettingResponse()
        for name, value in self._server.trace.get(model).items():
            response.settings[name].value.extend(value if isinstance(value, list) else [str(value)])
        return response

    def log_settings(self, request: Any) -> Any:
        sent = request.settings
        values = {name: _log_value(name, sent[name]) for name in LOG_SETTINGS if name in sent}
        if values:
            self._server.log_settings.update(values)
        response = pb.LogSettingsResponse()
        for name, value in self._server.log_settings.get().items():
            setattr(response.settings[name], _LOG_KINDS[name][0], value)
        return response


def _trace_value(name: str, value: Any) -> TraceValue | None:
    """Return the value; None, which takes a change back, for an empty one."""
    if name == "trace_level":
        return list(value) or None
    if len(value) > 1:
        raise _invalid(f"expect only 1 value for '{name}'")
    return str(value[0]) if value else None


def _log_value(name: str, value: Any) -> LogValue:
    kind, expected = _LOG_KINDS[name]
    if value.WhichOneof("parameter_choice") != kind:
        raise _invalid(f"expect {expected} for '{name}'")
    setting: LogValue = getattr(value, kind)
    if name == "log_format" and setting not in _LOG_FORMATS:
        raise _invalid(f"invalid argument for log_format, got: {setting}")
    return setting


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)


HEALTH_SERVICE = "grpc.health.v1.Health"
_WATCH_PERIOD_S = 0.5
"""Seconds between looks at a watched state: nothing announces its changes."""
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthService:
    """Answers grpc.health.v1 for probes and load balancers: of a model by its name, of the server by any other."""

    def __init__(self, server: V2Server) -> None:
        self._server = server
        self._stopping = asyncio.Event()

    def handlers(self) -> dict[str, Any]:
        """Return the handlers of its methods by name."""
        return {
            "Check": sync_handler("Check", health_pb2.HealthCheckRequest, self.check),
            "Watch": grpc.unary_stream_rpc_method_handler(self.watch),
        }

    def stop(self) -> None:
        """Report NOT_SERVING from here on, and end the watches."""
        self._stopping.set()

    def check(self, request: Any) -> Any:
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def watch(self, raw: bytes, context: Any) -> None:
        """Send the state now, and each change of it."""
        request = parse_message(health_pb2.HealthCheckRequest, raw)
        sent: Any = None
        while True:
            is_last = self._stopping.is_set()  # before the write: a stop during it is still to be sent
            status = self._status(request.service)
            if status != sent:
                sent = status
                await context.write(health_pb2.HealthCheckResponse(status=status).SerializeToString())
            if is_last:
                return
            try:
                await asyncio.wait_for(self._stopping.wait(), _WATCH_PERIOD_S)
            except TimeoutError:
                continue

    def _status(self, name: str) -> Any:
        """Return the state of a model or the server. As in Triton, unknown names stand for the server."""
        if self._stopping.is_set():
            return _NOT_SERVING
        is_model = name in {model.name for model in self._server.repository.models()}
        is_ready = self._server.is_model_ready(name, LATEST) if is_model else self._server.health.is_ready()
        return _SERVING if is_ready else _NOT_SERVING
