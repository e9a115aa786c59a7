"""tritonserver's flags that mean nothing here: they are understood, and who gives them hears what holds instead."""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.options.option import ConfigError, truth


@dataclass(frozen=True, slots=True)
class AcceptedFlag:
    """`advice` says what holds instead.

    Where `is_refused` is not None, the flag with that truth asks for what there is not: the server does not start.
    """

    flag: str
    advice: str
    is_refused: bool | None = None


_ONE_LOOP = "connections share one event loop, and backends have threads of their own"
_NO_POOL = "tensors are not copied to a pool; each backend's library keeps its own memory"
_NO_TRACE_FLAGS = "write --trace-config triton,{}"
_SAGEMAKER = "there is no SageMaker endpoint; put one in front, its /invocations is /v2/models/NAME/infer"
_VERTEX = "there is no Vertex AI endpoint; put one in front, its :predict is /v2/models/NAME/infer"
_BACKENDS = "backends are Python packages, found by entry point (docs/backends.md)"

ACCEPTED = (
    AcceptedFlag("--allow-http", "HTTP has the health probes; --host 127.0.0.1 keeps it to this machine", False),
    AcceptedFlag("--http-thread-count", _ONE_LOOP),
    AcceptedFlag("--grpc-infer-thread-count", _ONE_LOOP),
    AcceptedFlag("--grpc-infer-allocation-pool-size", "messages are freed when they are sent"),
    AcceptedFlag("--grpc-max-response-pool-size", "a stream keeps no more than its reader is behind"),
    AcceptedFlag("--buffer-manager-thread-count", _ONE_LOOP),
    AcceptedFlag("--pinned-memory-pool-byte-size", _NO_POOL),
    AcceptedFlag("--cuda-memory-pool-byte-size", _NO_POOL),
    AcceptedFlag("--cuda-virtual-address-size", _NO_POOL),
    AcceptedFlag("--enable-peer-access", _NO_POOL),
    AcceptedFlag("--min-supported-compute-capability", "each backend's library says which GPUs it runs on"),
    AcceptedFlag("--backend-directory", _BACKENDS),
    AcceptedFlag("--repoagent-directory", "the one agent is checksum, and it is built in"),
    AcceptedFlag("--cache-directory", "caches are built in: --cache-config local,... or redis,..."),
    AcceptedFlag("--allow-sagemaker", _SAGEMAKER, True),
    AcceptedFlag("--sagemaker-port", _SAGEMAKER),
    AcceptedFlag("--sagemaker-safe-port-range", _SAGEMAKER),
    AcceptedFlag("--sagemaker-thread-count", _SAGEMAKER),
    AcceptedFlag("--allow-vertex-ai", _VERTEX, True),
    AcceptedFlag("--vertex-ai-port", _VERTEX),
    AcceptedFlag("--vertex-ai-thread-count", _VERTEX),
    AcceptedFlag("--vertex-ai-default-model", _VERTEX),
    AcceptedFlag("--strict-model-config", "that was replaced by --disable-auto-complete-config", True),
    AcceptedFlag("--allow-poll-model-repository", "that was replaced by --model-control-mode poll", True),
    AcceptedFlag("--allow-model-control", "that was replaced by --model-control-mode explicit", True),
    AcceptedFlag("--trace-file", _NO_TRACE_FLAGS.format("file=PATH")),
    AcceptedFlag("--trace-level", _NO_TRACE_FLAGS.format("level=TIMESTAMPS")),
    AcceptedFlag("--trace-rate", _NO_TRACE_FLAGS.format("rate=N")),
    AcceptedFlag("--trace-count", _NO_TRACE_FLAGS.format("count=N")),
    AcceptedFlag("--trace-log-frequency", _NO_TRACE_FLAGS.format("log-frequency=N")),
    AcceptedFlag("--tf-allow-soft-placement", "SavedModels run in OpenVINO"),
    AcceptedFlag("--tf-gpu-memory-fraction", "SavedModels run in OpenVINO"),
)
_BY_FLAG = {each.flag: each for each in ACCEPTED}


def advice_on(given: Mapping[str, object]) -> list[str]:
    """A sentence for each accepted flag in `given`. Raises ConfigError for one that asks for what there is not."""
    sentences = []
    for flag, value in given.items():
        accepted = _BY_FLAG.get(flag)
        if accepted is None:
            continue
        if accepted.is_refused is not None and _truth(flag, str(value)) is accepted.is_refused:
            raise ConfigError(f"{flag} {value}: {accepted.advice}")
        sentences.append(f"{flag} has no effect: {accepted.advice}")
    return sentences


def _truth(flag: str, text: str) -> bool:
    try:
        return truth(text)
    except ValueError as error:
        raise ConfigError(f"{flag} must be {error}, got {text!r}") from None
