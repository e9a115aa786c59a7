"""Reasons why tests of Triton's QA do not pass, by `SUITE/FILE::CLASS.TEST`, in which * stands for anything."""

from fnmatch import fnmatchcase

_GPU = "needs CUDA shared memory"
_TENSORRT = "needs models of TensorRT"
_POOL = "needs the pinned memory pool, which Sluice has not"
_NGINX = "needs nginx"
_CPP = "needs the query backend, which asks the C API for kinds of memory"
CANNOT_RUN = {
    "L0_http/http_basic_auth_test.py::*": _NGINX,
    "L0_grpc/grpc_basic_auth_test.py::*": _NGINX,
    "*/python_*_aio_test.py::*repository_index": "counts a model that its image downloads",
    "L0_grpc/*::*register_cuda*": _GPU,
    "L0_metrics/*.test_cpu_metrics_during_inference": "needs a machine that is otherwise idle",
    "L0_metrics/pinned_memory_metrics_test.py::*": _POOL,
    "L0_query/*": _CPP,
    "L0_infer_reshape/*.test_ff[24]": _TENSORRT,
    "L0_input_validation/*.test_wrong_input_shape_tensor_size": _TENSORRT,
    "L0_lifecycle/*.test_dynamic_file_delete": _TENSORRT,
    "L0_lifecycle/*.test_model_reload_fail": "needs the identity backend's own file",
    "L0_lifecycle/*.test_load_gpu_limit": "needs a GPU",
    "L0_request_cancellation/*.test_grpc_async_infer_*cancellation*": "needs delays of Triton's frontend",
    "L0_response_statistics/*": "needs a backend in C++ that counts its responses",
    "L0_client_timeout/*": "its clients in C++ come first",
    "L0_server_status/*::*infer_stats_no_model": "counts models of bfloat16",
    "*::program": "does not start",
}
"""Needs that this machine and these stand-ins do not meet. Such tests count neither as passed nor as failed."""
DIFFERENT = {
    "L0_logging/*.test_format*": "lines of the log have a form of their own",
    "L0_logging/*.test_injection*unescaped*": "lines of the log can never be forged",
    "L0_iterative_sequence/*.test_reschedule_error": "a sequence whose request runs is not idle",
    "L0_lifecycle/*.test_multiple_model_repository_polling": "a model that comes to be in two repositories serves on",
    "L0_lifecycle/*.test_parse_error_no_model_config": "a model without configuration is one that is not ready",
    "L0_lifecycle/*.test_parse_error_noexit": "a server without its repository ends",
    "L0_lifecycle/*.test_concurrent_model_load_unload": "unloading a step's model fails the load of its ensemble",
    "L0_rate_limiter/*_limited_resource": "counts 16 to 9 in place of 2 to 1",
    "L0_lifecycle/*.test_shutdown_*": "a server that shuts down refuses requests with that reason, not connections",
    "L0_grpc/*.test_bytes_contents_many_elements_serialization": "a tensor takes at most 262144 strings",
    "L0_model_update/*.test_instance_resource_*": "with other resources of the rate limiter a model is loaded anew",
    "L0_model_update/*.test_rm_add_rm_instance_*": "an instance that has just answered ends a moment after the load",
    "L0_metrics/*::TestHistogramMetrics.*": "numbers of the metrics are floats, 0.0 in place of 0",
    "L0_metrics/*.test_model_namespacing_label_with_namespace_on": "labels have the qualified name of the model",
    "L0_model_queue/*.test_policy_reject": "a failed request of an ensemble counts once, by its reason",
    "L0_response_cache/ensemble_cache_test.py::*": "an ensemble's steps have caches, not the ensemble",
    "L0_metrics/cpu_metrics_test.py::*_ranges": "reads 2.5e+10 as 2.5",
    "L0_http/*_reject_with_bounded_rss_growth": "a client's 100 requests may leave 2 MiB, not only 1",
    "L0_http/http_test.py::*chunked_manually": "a body with both Content-Length and Transfer-Encoding is refused",
    "*/python_*_aio_test.py::*load_model": "the refusal names the mode",
    "L0_http/http_test.py::*index_deeply_nested_json": "refused too, for its size",
}
"""Differences of Sluice, on purpose or for now."""


def find_reason(reasons: dict[str, str], test: str) -> str | None:
    """Return the reason of the first pattern that `test` fits."""
    return next((reason for pattern, reason in reasons.items() if fnmatchcase(test, pattern)), None)
