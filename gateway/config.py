"""Every option of `sluice serve`, declared once: flag, variable, default, unit, and what raising it costs.

This module alone reads the environment. A flag wins over its variable SLUICE_<FLAG>, and that over the
default. The tree is made once, in the command line's code, and passed on in parts.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from engine.config import EngineConfig
from gateway.options import ConfigError, Option, choice, integer, option, option_of, seconds, size, text_of, truth

_PORTS = integer(0, 65535)
_DEFAULTS = EngineConfig(model_path="")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Model: what is served"""

    path: str | None = option(
        "MODEL",
        None,
        text_of("the folder of a HuggingFace checkpoint"),
        "MODEL",
        "folder of a HuggingFace checkpoint (config.json, *.safetensors, tokenizer.json). Nothing is downloaded. "
        "Default: rill, the small chat model that comes with Sluice",
    )
    served_model_name: str | None = option(
        "--served-model-name",
        None,
        text_of("a name without control characters"),
        "NAME",
        "the name clients ask for. Default: the folder's name",
    )
    dtype: str = option(
        "--dtype",
        _DEFAULTS.dtype,
        choice("auto", "bf16", "f32"),
        "TYPE",
        "precision of the computation: auto, bf16 or f32. auto takes bf16 where the CPU has it; f32 is exact and "
        "about half as fast",
    )


@dataclass(frozen=True, slots=True)
class SchedulingOptions:
    """Scheduling and memory: how many requests share the model, and what that costs"""

    max_model_len: int | None = option(
        "--max-model-len",
        None,
        integer(2),
        "TOKENS",
        "longest prompt and answer together. Longer ones may hold more KV blocks, so fewer requests run at once. "
        "Default: what the model was trained for",
    )
    max_num_seqs: int = option(
        "--max-num-seqs",
        _DEFAULTS.max_num_seqs,
        integer(1, 4096),
        "N",
        "most requests in one step. More raises the total tokens per second, and lengthens every step, so each "
        "stream gets slower",
    )
    max_num_batched_tokens: int = option(
        "--max-num-batched-tokens",
        _DEFAULTS.max_num_batched_tokens,
        integer(1),
        "TOKENS",
        "most tokens in one step: one for each running request, the rest for prompts, which come in chunks. More "
        "brings first tokens sooner, and makes running streams stutter while a prompt is read. At least --max-num-seqs",
    )
    num_blocks: int | None = option(
        "--num-blocks",
        None,
        integer(1),
        "N",
        "KV cache blocks, instead of --kv-cache-memory. A request is admitted only when all it could ever need is free",
    )
    kv_cache_memory_bytes: int | None = option(
        "--kv-cache-memory",
        _DEFAULTS.kv_cache_memory_bytes,
        size(1 << 20),
        "SIZE",
        "memory for the KV cache, taken at start: bytes, or 256M, 2G. More lets more or longer requests run at once",
    )
    max_queued_requests: int = option(
        "--max-queue-size",
        _DEFAULTS.max_queued_requests,
        integer(0),
        "REQUESTS",
        "most requests waiting to be admitted; one more gets 429 with Retry-After. More hides overload from clients "
        "behind long waits",
    )
    num_threads: int | None = option(
        "--num-threads",
        None,
        integer(1, 1024),
        "N",
        "threads of the model's runtime. More than there are free cores makes it slower. Default: one for each core",
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


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Metrics: Prometheus"""

    port: int = option("--metrics-port", 8002, _PORTS, "PORT", "port of GET /metrics; 0 takes a free one")


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
        "liveness fails when the engine says nothing for this long. It speaks twice a second when idle and after "
        "every step, so this must exceed the longest step",
    )


@dataclass(frozen=True, slots=True)
class LoggingOptions:
    """Logging: to standard error"""

    level: str = option(
        "--log-level",
        "info",
        choice("debug", "info", "warning", "error"),
        "LEVEL",
        "debug, info, warning or error",
    )


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """All options of `sluice serve`. Each field is a group; its docstring is the group's title in --help."""

    model: ModelOptions = field(default_factory=ModelOptions)
    scheduling: SchedulingOptions = field(default_factory=SchedulingOptions)
    http: HttpOptions = field(default_factory=HttpOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    access: AccessOptions = field(default_factory=AccessOptions)
    shutdown: ShutdownOptions = field(default_factory=ShutdownOptions)
    logging: LoggingOptions = field(default_factory=LoggingOptions)

    def __post_init__(self) -> None:
        """Check what options say together. Raises ConfigError."""
        tokens, seqs = self.scheduling.max_num_batched_tokens, self.scheduling.max_num_seqs
        if tokens < seqs:
            raise ConfigError(
                f"--max-num-batched-tokens must be at least --max-num-seqs ({seqs}), so that every running request "
                f"gets its token in each step, got {tokens}"
            )
        if self.http.port == self.metrics.port != 0:
            raise ConfigError(f"--metrics-port must differ from --http-port, got {self.metrics.port} for both")

    def engine(self, model_path: str) -> EngineConfig:
        """The engine's part of the configuration."""
        limits = {name: getattr(self.scheduling, name) for name, _, _ in options_of(SchedulingOptions)}
        return EngineConfig(model_path=model_path, dtype=self.model.dtype, **limits)


Group = type[
    ModelOptions | SchedulingOptions | HttpOptions | MetricsOptions | AccessOptions | ShutdownOptions | LoggingOptions
]
GROUPS: dict[str, Group] = {
    "model": ModelOptions,
    "scheduling": SchedulingOptions,
    "http": HttpOptions,
    "metrics": MetricsOptions,
    "access": AccessOptions,
    "shutdown": ShutdownOptions,
    "logging": LoggingOptions,
}


def options_of(group: Group) -> list[tuple[str, Any, Option]]:
    """(field, default, option) of every option in `group`."""
    return [(declared.name, declared.default, option_of(declared)) for declared in fields(group)]


def read_config(given: Mapping[str, str | bool], environ: Mapping[str, str] | None = None) -> ServeConfig:
    """The configuration from flags (`given`: flag to its text; True for a switch) and environment.

    Raises ConfigError for the first option that holds what it must not.
    """
    if environ is None:
        environ = os.environ  # noqa: TID251 - here the environment enters, and nowhere else
    return ServeConfig(**{name: _read_group(group, given, environ) for name, group in GROUPS.items()})


def _read_group(group: Group, given: Mapping[str, str | bool], environ: Mapping[str, str]) -> Any:
    values: dict[str, Any] = {}
    for name, _, declared in options_of(group):
        flag = given.get(declared.flag)
        if isinstance(flag, str):
            values[name] = declared.read(flag, declared.flag)
        elif flag is not None:
            values[name] = flag
        elif declared.variable in environ:
            values[name] = declared.read(environ[declared.variable], declared.variable)
    return group(**values)


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Variables that look like ours and are not: most likely a slip of the pen."""
    if environ is None:
        environ = os.environ  # noqa: TID251 - as above
    known = {declared.variable for group in GROUPS.values() for _, _, declared in options_of(group)}
    return sorted(name for name in environ if name.startswith("SLUICE_") and name not in known)
