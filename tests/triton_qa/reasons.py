"""Reasons why tests of Triton's QA do not pass, by `SUITE/FILE::CLASS.TEST`, in which * stands for anything."""

from fnmatch import fnmatchcase

_GPU = "needs CUDA shared memory"
_TORCH = "needs torch in the scripts' Python"
_POOL = "needs the pinned memory pool, which Sluice has not"
_NGINX = "needs nginx"
_CPP = "needs the query backend, which asks the C API for kinds of memory"
CANNOT_RUN = {
    "L0_http/http_basic_auth_test.py::*": _NGINX,
    "L0_grpc/grpc_basic_auth_test.py::*": _NGINX,
    "*/python_*_aio_test.py::*repository_index": "counts a model that its image downloads",
    "L0_grpc/*::*register_cuda*": _GPU,
    "L0_input_validation/*::InputShapeTest.*": _TORCH,
    "L0_metrics/pinned_memory_metrics_test.py::*": _POOL,
    "L0_query/*": _CPP,
    "L0_nan_inf/*": "its model needs numpy 1",
    "L0_client_timeout/*": "its clients in C++ come first",
    "L0_server_status/*::*infer_stats_no_model": "counts models of bfloat16",
    "*::program": "does not start",
}
"""Needs that this machine and these stand-ins do not meet. Such tests count neither as passed nor as failed."""
DIFFERENT = {
    "L0_logging/log_format_test.py::*": "lines of the log have a form of their own",
    "L0_metrics/cpu_metrics_test.py::*_ranges": "reads 2.5e+10 as 2.5",
    "L0_http/http_test.py::*chunked_manually": "a body with both Content-Length and Transfer-Encoding is refused",
    "L0_http/generate_endpoint_test.py::*test_duplicate_inputs": "of equal keys the last counts",
    "*/python_*_aio_test.py::*load_model": "the refusal names the mode",
    "L0_http/http_test.py::*index_deeply_nested_json": "refused too, for the depth",
}
"""Differences of Sluice, on purpose or for now."""


def find_reason(reasons: dict[str, str], test: str) -> str | None:
    """Return the reason of the first pattern that `test` fits."""
    return next((reason for pattern, reason in reasons.items() if fnmatchcase(test, pattern)), None)
