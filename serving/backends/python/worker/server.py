"""Calls of models to the server itself: its repository, and metrics, whose series on the server outlive them."""

import itertools
import sys
import weakref
from enum import Enum
from typing import Any, ClassVar

from sluice.serving.backends.python import frames
from sluice.serving.backends.python.worker.channel import Channel
from sluice.serving.backends.python.worker.errors import TritonModelException, check_str

_FILE_PREFIX = "file:"
_numbers = itertools.count(1)


class ServerProxy:
    """The server at the other end of the worker's socket. Thread-safe."""

    _channel: ClassVar[Channel | None] = None
    """Channel to the server. The worker sets it once."""

    @classmethod
    def call(cls, request: frames.ServerRequest, failure: str) -> float | bool | None:
        """Call the server and return its value. Raises TritonModelException, beginning with `failure`."""
        if cls._channel is None:
            raise RuntimeError("the server can be asked in a worker process only")
        response = cls._channel.call_server(request)
        if response.error is not None:
            raise TritonModelException(f"{failure}: {response.error[1]}")
        return response.value

    @classmethod
    def release(cls, numbers: list[int]) -> None:
        """Release metric families and metrics, unless the worker is ending."""
        if cls._channel is not None and not sys.is_finalizing():
            cls._channel.post(frames.ReleaseMetrics(numbers))
            cls._channel.flush()

    @classmethod
    def close(cls) -> None:
        """Forget the channel, so that later releases do nothing."""
        cls._channel = None


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Load or reload a model, and wait. `config` is JSON in place of config.pbtxt, `files` are by `file:PATH`."""
    name = check_str(model_name, "model_name")
    ServerProxy.call(
        frames.LoadModel(name, check_str(config, "config"), _check_files(name, files)), "Failed to load model"
    )


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model. Requests in flight run to their end."""
    ServerProxy.call(
        frames.UnloadModel(check_str(model_name, "model_name"), bool(unload_dependents)), "Failed to unload model"
    )


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return whether a version serves; without one, whether any does."""
    request = frames.CheckModelReady(check_str(model_name, "model_name"), _parse_version(str(model_version)))
    return bool(ServerProxy.call(request, "Failed to check model readiness"))


def _check_files(model_name: str, files: Any) -> dict[str, bytes]:
    if files is None:
        return {}
    if not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file contents"
        )
    for path, content in files.items():
        if not isinstance(path, str) or not path.startswith(_FILE_PREFIX) or not isinstance(content, bytes):
            raise TritonModelException(
                f"failed to load model '{model_name}', files should be contents as bytes by '{_FILE_PREFIX}PATH': "
                f"{path!r} is not"
            )
    return {check_str(path, "a file's path").removeprefix(_FILE_PREFIX): each for path, each in files.items()}


def _parse_version(text: str) -> int:
    if not text:
        return -1
    if not text.isdecimal():
        raise TritonModelException(
            f"Failed to check model readiness: failed to get model version from specified version string '{text}', "
            "version should be an integral value > 0"
        )
    return int(text)


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric:
    """A series with labels. Made by `MetricFamily.Metric`, and invalid once its family is deleted."""

    def __init__(self, family: int, labels: dict[str, str], buckets: list[float] | None) -> None:
        self._number = 0
        number = next(_numbers)
        ServerProxy.call(frames.CreateMetric(number, family, labels, buckets), "Error when creating Metric")
        self._number = number

    def increment(self, value: float) -> None:
        """Increment a counter, by 0 or more, or a gauge."""
        self._use("increment", value)

    def set(self, value: float) -> None:
        self._use("set", value)

    def observe(self, value: float) -> None:
        self._use("observe", value)

    def value(self) -> float:
        """Return the value of a counter or a gauge, which all instances share that have a metric with these labels."""
        value = self._use("value", 0.0, "get")
        assert value is not None
        return float(value)

    def _use(self, operation: str, value: float, verb: str = "") -> float | bool | None:
        failure = f"Failed to {verb or operation} metric value"
        if not self._number:
            raise TritonModelException(
                f"{failure}: Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The "
                "'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects have been deleted."
            )
        return ServerProxy.call(frames.UseMetric(self._number, operation, float(value)), failure)

    def _clear(self) -> None:
        number, self._number = self._number, 0
        if number:
            ServerProxy.release([number])

    def __del__(self) -> None:
        self._clear()


class MetricFamily:
    """A metric family. Families of the same name and kind are one on the server, whichever model makes them."""

    COUNTER: ClassVar = MetricKind.COUNTER
    GAUGE: ClassVar = MetricKind.GAUGE
    HISTOGRAM: ClassVar = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self._number = 0
        self._metrics: weakref.WeakSet[Metric] = weakref.WeakSet()
        if not isinstance(kind, MetricKind):
            raise TypeError(f"MetricFamily takes MetricFamily.COUNTER, GAUGE or HISTOGRAM as its kind, not {kind!r}")
        self._kind = kind
        number = next(_numbers)
        request = frames.CreateMetricFamily(
            number, check_str(name, "name"), check_str(description, "description"), kind.value
        )
        ServerProxy.call(request, "Error when creating MetricFamily")
        self._number = number

    def Metric(self, labels: dict[str, str] | None = None, buckets: list[float] | None = None) -> Metric:
        """Return the series with these labels. A histogram takes the upper bounds of its buckets, ascending."""
        metric = Metric(self._number, _check_labels(labels), self._check_buckets(buckets))
        self._metrics.add(metric)
        return metric

    def _check_buckets(self, buckets: Any) -> list[float] | None:
        if buckets is None:
            if self._kind is MetricKind.HISTOGRAM:
                raise TritonModelException("Failed to create metric. Missing required buckets.")
            return None
        if not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if self._kind is not MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        return [float(bound) for bound in buckets]

    def __del__(self) -> None:
        for metric in list(self._metrics):
            metric._clear()
        if self._number:
            ServerProxy.release([self._number])


def _check_labels(labels: Any) -> dict[str, str]:
    if labels is None:
        return {}
    if not isinstance(labels, dict):
        raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
    for key, value in labels.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TritonModelException(f"Failed to create metric. Labels are str by str: {key!r} is not.")
        check_str(key, "a label's name")
        check_str(value, f"the label '{key}'")
    return labels
