"""Every option of `sluice serve`, declared once: flag, variable, default, unit, and what raising it costs.

This module alone reads the environment. A flag wins over its variable SLUICE_<FLAG>, and that over the
default. The tree is made once, in the command line's code, and passed on in parts.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import msgspec

from engine.config import EngineConfig, Runtime, Speculation
from gateway.access.restricted import Restriction, repeated_api, restriction
from gateway.options.engine import CacheOptions, ModelOptions, SchedulingOptions, SpeculationOptions
from gateway.options.grpc import GrpcOptions
from gateway.options.instances import InstanceOptions
from gateway.options.logging import LoggingOptions
from gateway.options.metrics import MetricsOptions
from gateway.options.option import (
    ConfigError,
    Option,
    integer,
    option,
    option_of,
    pattern,
    seconds,
    size,
    text_of,
    truth,
)
from gateway.options.rag import RagOptions
from gateway.options.rag_client import ClientOptions
from gateway.options.repository import RepositoryOptions
from gateway.options.response_cache import ResponseCacheOptions
from gateway.options.step_sizes import CPU_SEQS, STEP_SIZES, step_sizes
from gateway.options.tensorrt_llm import TensorRtLlmOptions
from gateway.options.trace import TraceOptions
from serving.repository.settings import ControlMode

if TYPE_CHECKING:
    from pipelines.llm.services import RequestLimits

_PORTS = integer(0, 65535)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Requests: what holds for one that does not say"""

    timeout_s: float | None = option(
        "--request-timeout-secs",
        None,
        seconds(0.001),
        "SECONDS",
        "longest time from a request's arrival to its last token; one that takes longer ends in an error (504). "
        "Clients send x-sluice-timeout-ms. Default: no limit",
    )
    queue_timeout_s: float | None = option(
        "--queue-timeout-secs",
        None,
        seconds(0.001),
        "SECONDS",
        "longest time that a request waits to be admitted; then it ends in an error (504). Clients send "
        "x-sluice-queue-timeout-ms. Default: no limit",
    )


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """HTTP: the OpenAI API under /v1, Triton's protocol under /v2"""

    host: str = option(
        "--host",
        "127.0.0.1",
        text_of("a host name or address"),
        "ADDRESS",
        "address to listen on, for metrics too. 0.0.0.0 takes requests from everywhere: then set SLUICE_API_KEY",
        ("--http-address",),
    )
    port: int = option("--http-port", 8000, _PORTS, "PORT", "port of both protocols; 0 takes a free one")
    shares_port: bool = option(
        "--reuse-http-port",
        False,
        truth,
        "BOOL",
        "let several servers listen on the same port, each taking some of the connections; all need this option",
    )
    max_input_bytes: int = option(
        "--http-max-input-size",
        64 << 20,
        size(1),
        "SIZE",
        "longest request body: bytes, or 64M. Each request may take several times this in memory while it is parsed",
    )
    is_strict: bool = option(
        "--strict",
        False,
        truth,
        None,
        "refuse OpenAI requests with unknown fields. Without it they are ignored, and a warning header names them",
    )
    server_id: str = option(
        "--id",
        "triton",
        text_of("a name without control characters"),
        "NAME",
        "the name under which the server presents itself in the v2 protocol's metadata",
    )
    forwarded_headers: str | None = option(
        "--http-header-forward-pattern",
        None,
        pattern,
        "REGEX",
        "headers whose whole name matches become request parameters of the v2 protocol",
    )
    restrictions: tuple[Restriction, ...] = option(
        "--http-restricted-api",
        (),
        restriction,
        "APIS:KEY=VALUE",
        "parts of the API (health, metadata, inference, shared-memory, model-config, model-repository, statistics, "
        "trace, logging; commas between) for requests with the header KEY: VALUE. OpenAI's routes are among them. May "
        "be given several times",
        secret=True,
        is_many=True,
        separator=";",
    )

    def __post_init__(self) -> None:
        """Check what options say together. Raises ConfigError."""
        if (api := repeated_api(self.restrictions)) is not None:
            raise ConfigError(f"--http-restricted-api names '{api}' more than once; give it one key")


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Access: who may ask"""

    api_key: str | None = option(
        "--api-key",
        None,
        text_of("printable text that is not empty"),
        "KEY",
        "clients must send `Authorization: Bearer KEY`, for everything but health. Better set SLUICE_API_KEY: "
        "every user of the machine can read a command line",
        secret=True,
    )


@dataclass(frozen=True, slots=True)
class ShutdownOptions:
    """Shutdown and supervision"""

    exit_timeout_s: float = option(
        "--exit-timeout-secs",
        30.0,
        seconds(0),
        "SECONDS",
        "after SIGTERM or Ctrl-C, how long open streams may go on; then each ends with an error event. A second "
        "signal ends at once. Keep it below what your supervisor waits before it kills",
    )
    heartbeat_timeout_s: float = option(
        "--engine-heartbeat-timeout-secs",
        10.0,
        seconds(1),
        "SECONDS",
        "an engine that says nothing for this long is killed and replaced. It speaks twice a second when idle and "
        "after every step, so this must exceed the longest step",
    )


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """All options of `sluice serve`. Each field is a group; its docstring is the group's title in --help."""

    model: ModelOptions = field(default_factory=ModelOptions)
    repository: RepositoryOptions = field(default_factory=RepositoryOptions)
    instances: InstanceOptions = field(default_factory=InstanceOptions)
    rag: RagOptions = field(default_factory=RagOptions)
    response_cache: ResponseCacheOptions = field(default_factory=ResponseCacheOptions)
    scheduling: SchedulingOptions = field(default_factory=SchedulingOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    tensorrt_llm: TensorRtLlmOptions = field(default_factory=TensorRtLlmOptions)
    requests: RequestOptions = field(default_factory=RequestOptions)
    http: HttpOptions = field(default_factory=HttpOptions)
    grpc: GrpcOptions = field(default_factory=GrpcOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    access: AccessOptions = field(default_factory=AccessOptions)
    shutdown: ShutdownOptions = field(default_factory=ShutdownOptions)
    logging: LoggingOptions = field(default_factory=LoggingOptions)
    trace: TraceOptions = field(default_factory=TraceOptions)

    def __post_init__(self) -> None:
        """Check what options say together. Raises ConfigError."""
        tokens, seqs = self.scheduling.max_num_batched_tokens, self.scheduling.max_num_seqs or CPU_SEQS
        if tokens is not None and tokens < seqs:
            raise ConfigError(
                f"--max-num-batched-tokens must be at least --max-num-seqs ({seqs}), so that every running request "
                f"gets its token in each step, got {tokens}"
            )
        if self.http.port == self.metrics.port != 0:
            raise ConfigError(f"--metrics-port must differ from --http-port, got {self.metrics.port} for both")
        self._check_repository()
        self._check_cache()
        self._check_speculation()
        self._check_timeouts()

    def _check_repository(self) -> None:
        repository = self.repository
        if repository.load and repository.control_mode is not ControlMode.EXPLICIT:
            raise ConfigError(
                "--load-model needs --model-control-mode explicit; in the other modes nobody would ask it"
            )
        if repository.control_mode is not ControlMode.NONE and not repository.paths:
            raise ConfigError(f"--model-control-mode {repository.control_mode} needs --model-repository")
        if self.model.served_model_name and repository.paths and self.model.path is None:
            raise ConfigError("--served-model-name names MODEL; a repository's models have the names of their folders")
        of_model = {"--tokenizer": self.model.tokenizer_path, "--lora-modules": self.tensorrt_llm.lora_modules}
        given = [flag for flag, value in of_model.items() if value]
        if given and repository.paths and self.model.path is None:
            raise ConfigError(f"{given[0]} belongs to MODEL; a repository's models have theirs in their config.pbtxt")

    def _check_cache(self) -> None:
        sizes = ("kv_cache_memory_bytes", "kv_cache_memory_fraction", "num_blocks")
        flags = {name: declared.flag for name, _, declared in options_of(CacheOptions)}
        given = [flags[name] for name in sizes if getattr(self.cache, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{given[0]} and {given[1]} are two sizes for one KV cache; give one of them")

    def _check_speculation(self) -> None:
        wants_model = self.speculation.speculation is Speculation.DRAFT_MODEL
        path = self.speculation.draft_model_path
        if wants_model and path is None:
            raise ConfigError("--speculation draft_model needs --draft-model, the checkpoint to draft with")
        if path is not None and not wants_model:
            raise ConfigError("--draft-model needs --speculation draft_model; without it nothing would use that model")

    def _check_timeouts(self) -> None:
        whole, queue = self.requests.timeout_s, self.requests.queue_timeout_s
        if whole is not None and queue is not None and queue > whole:
            raise ConfigError(
                f"--queue-timeout-secs must be at most --request-timeout-secs ({whole:g}), which counts the wait too, "
                f"got {queue:g}"
            )

    def request_limits(self) -> "RequestLimits":
        """The time limits of requests that name none."""
        from pipelines.llm.services import RequestLimits  # slow to import, and the engine starts before it is wanted

        return RequestLimits(self.requests.timeout_s, self.requests.queue_timeout_s)

    def engine(self, model_path: str, runtime: Runtime | None = None) -> EngineConfig:
        """The engine's part of the configuration; `runtime` is a model's own, over that of the command line."""
        parts = (self.scheduling, self.cache, self.speculation)
        given = {name: getattr(part, name) for part in parts for name, _, _ in options_of(type(part))}
        sizes = {name: given.pop(name) for name in STEP_SIZES}
        model = self.model
        engine = EngineConfig(
            model_path=model_path,
            dtype=model.dtype,
            quantization=model.quantization,
            cache_path=model.cache_path,
            runtime=runtime or model.runtime,
            tokenizer_path=model.tokenizer_path,
            **{name: value for name, value in given.items() if value is not None},
            **self.tensorrt_llm.engine_fields(),
        )
        found = step_sizes(engine, sizes)
        wanted = {name: size for name, size in found.items() if sizes[name] or not self.tensorrt_llm.sets(name)}
        return msgspec.structs.replace(engine, **wanted)


Group = type[
    ModelOptions
    | RepositoryOptions
    | InstanceOptions
    | RagOptions
    | ResponseCacheOptions
    | SchedulingOptions
    | CacheOptions
    | SpeculationOptions
    | TensorRtLlmOptions
    | RequestOptions
    | HttpOptions
    | GrpcOptions
    | MetricsOptions
    | AccessOptions
    | ShutdownOptions
    | LoggingOptions
    | TraceOptions
    | ClientOptions
]
GROUPS: dict[str, Group] = {
    "model": ModelOptions,
    "repository": RepositoryOptions,
    "instances": InstanceOptions,
    "rag": RagOptions,
    "response_cache": ResponseCacheOptions,
    "scheduling": SchedulingOptions,
    "cache": CacheOptions,
    "speculation": SpeculationOptions,
    "tensorrt_llm": TensorRtLlmOptions,
    "requests": RequestOptions,
    "http": HttpOptions,
    "grpc": GrpcOptions,
    "metrics": MetricsOptions,
    "access": AccessOptions,
    "shutdown": ShutdownOptions,
    "logging": LoggingOptions,
    "trace": TraceOptions,
}


def options_of(group: Group) -> list[tuple[str, Any, Option]]:
    """(field, default, option) of every option in `group`."""
    return [(declared.name, declared.default, option_of(declared)) for declared in fields(group)]


Given = Mapping[str, str | bool | list[str]]
"""What a command line gives: flag to its text, its texts where it may come several times, a boolean for a switch."""


def read_config(given: Given, environ: Mapping[str, str] | None = None) -> ServeConfig:
    """The configuration from flags and environment.

    Raises ConfigError for the first option that holds what it must not.
    """
    if environ is None:
        environ = os.environ  # noqa: TID251 - here the environment enters, and nowhere else
    return ServeConfig(**{name: _read_group(group, given, environ) for name, group in GROUPS.items()})


def read_client_options(given: Given, environ: Mapping[str, str] | None = None) -> ClientOptions:
    """What `sluice rag` is told of the server, from flags and environment. Raises ConfigError as `read_config`."""
    if environ is None:
        environ = os.environ  # noqa: TID251 - as above
    options: ClientOptions = _read_group(ClientOptions, given, environ)
    return options


def _read_group(group: Group, given: Given, environ: Mapping[str, str]) -> Any:
    values: dict[str, Any] = {}
    for name, _, declared in options_of(group):
        flag = given.get(declared.flag)
        if isinstance(flag, list):
            values[name] = declared.read_many(flag, declared.flag)
        elif isinstance(flag, str):
            values[name] = declared.read(flag, declared.flag)
        elif flag is not None:
            values[name] = flag
        elif declared.variable in environ:
            values[name] = _from_variable(declared, environ[declared.variable])
    return group(**values)


def _from_variable(declared: Option, text: str) -> Any:
    if not declared.is_many:
        return declared.read(text, declared.variable)
    return declared.read_many((part.strip() for part in text.split(declared.separator)), declared.variable)


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Variables that look like ours and are not: most likely a slip of the pen."""
    if environ is None:
        environ = os.environ  # noqa: TID251 - as above
    groups = (*GROUPS.values(), ClientOptions)
    known = {declared.variable for group in groups for _, _, declared in options_of(group)}
    return sorted(name for name in environ if name.startswith("SLUICE_") and name not in known)
