"""Calls about shared memory, tracing and logging."""

from typing import Any

from tritonclient.grpc import service_pb2 as pb

from gateway.grpc.unary import simple
from gateway.v2.service import Service
from gateway.v2.settings import LOG_SETTINGS, TRACE_SETTINGS, SettingValue
from sluice.errors import ErrorCode, SluiceError

_LOG_KINDS = {
    "log_file": ("string_param", "string"),
    "log_info": ("bool_param", "boolean"),
    "log_warning": ("bool_param", "boolean"),
    "log_error": ("bool_param", "boolean"),
    "log_verbose_level": ("uint32_param", "int32"),
    "log_format": ("string_param", "string"),
}
_LOG_FORMATS = ("default", "ISO8601")


class SettingCalls:
    """Every method takes a message and gives one."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def handlers(self) -> dict[str, Any]:
        """By the method's name."""
        calls = {
            "SystemSharedMemoryStatus": self.system_status,
            "SystemSharedMemoryRegister": self.system_register,
            "SystemSharedMemoryUnregister": self.system_unregister,
            "CudaSharedMemoryStatus": self.cuda_status,
            "CudaSharedMemoryRegister": self.cuda_register,
            "CudaSharedMemoryUnregister": self.cuda_unregister,
            "TraceSetting": self.trace_setting,
            "LogSettings": self.log_settings,
        }
        return {name: simple(name, getattr(pb, f"{name}Request"), call) for name, call in calls.items()}

    # --- shared memory ---

    def system_status(self, request: Any) -> Any:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._service.shared_memory.status(request.name):
            found = response.regions[region.name]
            found.name, found.key = region.name, region.key
            found.offset, found.byte_size = region.offset, region.byte_size
        return response

    def system_register(self, request: Any) -> Any:
        memory = self._service.shared_memory
        memory.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def system_unregister(self, request: Any) -> Any:
        memory = self._service.shared_memory
        if request.name:
            memory.unregister(request.name)
        else:
            memory.unregister_all()
        return pb.SystemSharedMemoryUnregisterResponse()

    def cuda_status(self, request: Any) -> Any:
        name = request.name
        if not name:
            return pb.CudaSharedMemoryStatusResponse()
        if any(region.name == name for region in self._service.shared_memory.status()):
            reason = f"The region named '{name}' is registered as system shared memory, not CUDA shared memory"
            raise SluiceError(ErrorCode.NOT_FOUND, reason)
        raise SluiceError(ErrorCode.NOT_FOUND, f"Unable to find cuda shared memory region: '{name}'")

    def cuda_register(self, request: Any) -> Any:
        reason = f"failed to register CUDA shared memory region '{request.name}': this server has no GPU to share with"
        raise _invalid(reason)

    def cuda_unregister(self, request: Any) -> Any:
        """There is none, and one that is not known is no error."""
        return pb.CudaSharedMemoryUnregisterResponse()

    # --- tracing and logging ---

    def trace_setting(self, request: Any) -> Any:
        model = request.model_name or None
        if model is not None and not any(each.name == model for each in self._service.repository.models()):
            raise _invalid(f"Request for unknown model : {model}")
        given = request.settings
        values = {name: _trace_value(name, given[name].value) for name in TRACE_SETTINGS if name in given}
        if values:
            self._service.trace.update(values, model)
        response = pb.TraceSettingResponse()
        for name, value in self._service.trace.get(model).items():
            response.settings[name].value.extend(value if isinstance(value, list) else [str(value)])
        return response

    def log_settings(self, request: Any) -> Any:
        given = request.settings
        values = {name: _log_value(name, given[name]) for name in LOG_SETTINGS if name in given}
        if values:
            self._service.log_settings.update(values)
        response = pb.LogSettingsResponse()
        for name, value in self._service.log_settings.get().items():
            setattr(response.settings[name], _LOG_KINDS[name][0], value)
        return response


def _trace_value(name: str, value: Any) -> SettingValue | None:
    """None, which takes a change back, for one that is given empty."""
    if name == "trace_level":
        return list(value) or None
    if len(value) > 1:
        raise _invalid(f"expect only 1 value for '{name}'")
    return str(value[0]) if value else None


def _log_value(name: str, value: Any) -> SettingValue:
    kind, expected = _LOG_KINDS[name]
    if value.WhichOneof("parameter_choice") != kind:
        raise _invalid(f"expect {expected} for '{name}'")
    setting: SettingValue = getattr(value, kind)
    if name == "log_format" and setting not in _LOG_FORMATS:
        raise _invalid(f"invalid argument for log_format, got: {setting}")
    return setting


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)
