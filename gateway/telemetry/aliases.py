"""Names that some guides give Triton's metrics (`--metrics-config triton_infer_aliases=true`)."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from gateway.telemetry.families import COUNTER, GAUGE, ModelFamily, Source, family, model_family
from gateway.telemetry.gpu import GpuSample, gpu_values
from serving.statistics import ModelStatistics

_NS_PER_US = 1000


def _compute_us(statistics: ModelStatistics) -> int:
    infer = statistics.infer
    return (infer.compute_input.ns + infer.compute_infer.ns + infer.compute_output.ns) // _NS_PER_US


_FAMILIES = (
    ModelFamily(
        "triton_infer_request_duration_us",
        "The same as nv_inference_request_duration_us",
        lambda s: s.infer.success.ns // _NS_PER_US,
    ),
    ModelFamily(
        "triton_infer_queue_duration_us",
        "The same as nv_inference_queue_duration_us",
        lambda s: s.infer.queue.ns // _NS_PER_US,
    ),
    ModelFamily(
        "triton_infer_compute_duration_us",
        "nv_inference_compute_input_duration_us, _infer_ and _output_ together",
        _compute_us,
    ),
    ModelFamily(
        "triton_infer_total_request_count",
        "nv_inference_request_success and nv_inference_request_failure together",
        lambda s: s.infer.success.count + s.infer.fail.count,
    ),
    ModelFamily(
        "triton_infer_success_count", "The same as nv_inference_request_success", lambda s: s.infer.success.count
    ),
    ModelFamily(
        "triton_infer_failure_count",
        "nv_inference_request_failure of all reasons together",
        lambda s: s.infer.fail.count,
    ),
)

_GPU = "triton_gpu_utilization"
NAMES = frozenset({_GPU, *(each.name for each in _FAMILIES)})


def alias_families(sources: Sequence[Source], gpus: Sequence[GpuSample]) -> Iterator[Metric]:
    for declared in _FAMILIES:
        yield model_family(declared, COUNTER, sources)
    if gpus:
        percent = gpu_values(gpus, lambda gpu: None if gpu.utilization is None else gpu.utilization * 100)
        yield family(_GPU, "nv_gpu_utilization in percent", GAUGE, percent)
