"""Health, metadata, configuration, readiness, and paths without a route."""

from collections.abc import Iterator

from tests.triton.exam.ask import get, grpc, http, post
from tests.triton.records import Exchange

MODELS = (
    "identity",
    "identity_bytes",
    "identity_int32",
    "alltypes",
    "add_sub",
    "text_repeat",
    "text_once",
    "ensemble_addsub",
    "ensemble_stream",
    "sequence_accum",
    "sequence_text",
    "versioned",
    "error_model",
    "cached_square",
    "params_echo",
    "autoconf",
    "shout",
    "reshaped",
    "ragged",
    "half",
    "trickle",
)
VERSIONS = ("1", "2", "3", "99", "abc", "0", "-1", "01", "1.5", "99999999999999999999", "1%20", "%31")
UNROUTED = (
    "/",
    "/v1",
    "/v2/",
    "/v2/health",
    "/v2/health/",
    "/v2/health/live/",
    "/v2/health/nope",
    "/v2/models/",
    "/v2/models/identity/",
    "/v2/models/identity/nope",
    "/v2/models/identity/versions",
    "/v2/models/identity/versions/",
    "/v2/models/identity/versions/1/",
    "/v2/models/identity/versions/1/nope",
    "/v2/models/identity/infer/",
    "/v2/models//ready",
    "/v2/repository",
    "/v2/repository/models",
    "/v2/repository/models/identity",
    "/v2/repository/models/identity/nope",
    "/v2/systemsharedmemory",
    "/v2/systemsharedmemory/region/r/status",
    "/v2/cudasharedmemory",
    "/v2/logging/",
    "/v2/trace",
    "/v2/trace/setting/",
    "/v2/nope",
    "//v2",
    "/V2",
    "/metrics",
    "/v2?x=1",
    "/v2/health/ready?x=1",
    "/v2/models/identity?x=1",
    "/v2/models/identity/ready?x=1",
    "/v2/models/identity%2Fready",
    "/v2/models/ide%6Etity/ready",
)


def questions() -> Iterator[Exchange]:
    yield from _server()
    for model in MODELS:
        yield from _model(model)
    for version in VERSIONS:
        yield from _version(version)
    yield from _unknown()
    for path in UNROUTED:
        yield get(f"route{path}", path)
    yield from _methods()


def _server() -> Iterator[Exchange]:
    for state in ("live", "ready"):
        yield get(f"health/{state}", f"/v2/health/{state}")
        yield http(f"health/{state}_head", "HEAD", f"/v2/health/{state}")
    yield get("server_metadata", "/v2")
    yield grpc("server_live", "ServerLive")
    yield grpc("server_ready", "ServerReady")
    yield grpc("server_metadata", "ServerMetadata")
    yield grpc("health_check", "Health.Check")
    yield grpc("health_check_service", "Health.Check", {"raw_b64": "ChxpbmZlcmVuY2UuR1JQQ0luZmVyZW5jZVNlcnZpY2U="})
    yield grpc("health_check_unknown", "Health.Check", {"raw_b64": "CgRub3Bl"})
    yield grpc("unknown_method", "Unknown.Method")


def _model(model: str) -> Iterator[Exchange]:
    yield get(f"metadata/{model}", f"/v2/models/{model}")
    yield get(f"config/{model}", f"/v2/models/{model}/config")
    yield get(f"ready/{model}", f"/v2/models/{model}/ready")
    yield grpc(f"metadata/{model}", "ModelMetadata", {"name": model})
    yield grpc(f"config/{model}", "ModelConfig", {"name": model})
    yield grpc(f"ready/{model}", "ModelReady", {"name": model})


def _version(version: str) -> Iterator[Exchange]:
    path = f"/v2/models/versioned/versions/{version}"
    yield get(f"metadata_version/{version}", path)
    yield get(f"config_version/{version}", f"{path}/config")
    yield get(f"ready_version/{version}", f"{path}/ready")
    message = {"name": "versioned", "version": version}
    yield grpc(f"metadata_version/{version}", "ModelMetadata", message)
    yield grpc(f"config_version/{version}", "ModelConfig", message)
    yield grpc(f"ready_version/{version}", "ModelReady", message)


def _unknown() -> Iterator[Exchange]:
    for model in ("nope", "on_demand", "bad_load"):
        yield get(f"metadata_unknown/{model}", f"/v2/models/{model}")
        yield get(f"config_unknown/{model}", f"/v2/models/{model}/config")
        yield get(f"ready_unknown/{model}", f"/v2/models/{model}/ready")
        yield grpc(f"metadata_unknown/{model}", "ModelMetadata", {"name": model})
        yield grpc(f"config_unknown/{model}", "ModelConfig", {"name": model})
        yield grpc(f"ready_unknown/{model}", "ModelReady", {"name": model})
    yield grpc("metadata_unknown/empty", "ModelMetadata")
    yield grpc("config_unknown/empty", "ModelConfig")
    yield grpc("ready_unknown/empty", "ModelReady")


def _methods() -> Iterator[Exchange]:
    read_only = {
        "server": "/v2",
        "live": "/v2/health/live",
        "ready": "/v2/health/ready",
        "metadata": "/v2/models/identity",
        "config": "/v2/models/identity/config",
        "model_ready": "/v2/models/identity/ready",
        "stats": "/v2/models/identity/stats",
        "all_stats": "/v2/models/stats",
        "shm_status": "/v2/systemsharedmemory/status",
        "cuda_status": "/v2/cudasharedmemory/status",
    }
    for name, path in read_only.items():
        yield post(f"method/{name}_post", path, "{}")
        for method in ("PUT", "DELETE", "OPTIONS", "HEAD"):
            yield http(f"method/{name}_{method.lower()}", method, path)
    written = {
        "infer": "/v2/models/identity/infer",
        "generate": "/v2/models/text_once/generate",
        "generate_stream": "/v2/models/text_once/generate_stream",
        "index": "/v2/repository/index",
        "load": "/v2/repository/models/identity/load",
        "unload": "/v2/repository/models/identity/unload",
        "shm_register": "/v2/systemsharedmemory/region/r/register",
        "shm_unregister": "/v2/systemsharedmemory/unregister",
        "cuda_register": "/v2/cudasharedmemory/region/r/register",
    }
    for name, path in written.items():
        for method in ("GET", "PUT", "DELETE"):
            yield http(f"method/{name}_{method.lower()}", method, path)
    for name, path in {"logging": "/v2/logging", "trace": "/v2/trace/setting"}.items():
        for method in ("PUT", "DELETE"):
            yield http(f"method/{name}_{method.lower()}", method, path)
