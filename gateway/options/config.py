"""The configuration of `sluice serve`: all groups of options, read from flags and environment.

Each option is declared once, in its group: flag, variable, default, unit, and what raising it costs. This module alone
reads the environment. A flag wins over its variable SLUICE_<FLAG>, and that over the default. The tree is made once, in
the command line's code, and passed on in parts.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from sluice.engine.config import EngineConfig, Runtime, Speculation
from sluice.engine.runtimes import BUNDLED
from sluice.gateway.options.access import AccessOptions
from sluice.gateway.options.batches import BatchOptions
from sluice.gateway.options.engine import (
    STEP_SIZES,
    CacheOptions,
    ModelOptions,
    SchedulingOptions,
    SpeculationOptions,
    choose_step_sizes,
    chooses_chunk,
)
from sluice.gateway.options.engine_server import EngineServerOptions
from sluice.gateway.options.fleet import FleetOptions
from sluice.gateway.options.grpc import GrpcOptions
from sluice.gateway.options.http import HttpOptions, RequestOptions
from sluice.gateway.options.ledger import LedgerOptions
from sluice.gateway.options.option import Option, OptionError, declared_option, option, seconds
from sluice.gateway.options.quotas import QuotaOptions
from sluice.gateway.options.rag import RagClientOptions, RagOptions
from sluice.gateway.options.responses import ResponsesOptions
from sluice.gateway.options.routes import RouteOptions
from sluice.gateway.options.serving import InstanceOptions, RepositoryOptions, ResponseCacheOptions
from sluice.gateway.options.streams import ResumeOptions
from sluice.gateway.options.telemetry import LoggingOptions, MetricsOptions, TraceOptions
from sluice.gateway.options.tensorrt_llm import TensorRtLlmOptions
from sluice.gateway.options.tracing import TracingOptions
from sluice.serving.repository.settings import ControlMode

if TYPE_CHECKING:
    from sluice.pipelines.llm.services import ChatSettings, RequestLimits


GroupT = TypeVar("GroupT")


@dataclass(frozen=True, slots=True)
class ShutdownOptions:
    """Shutdown and supervision"""

    exit_timeout_s: float = option(
        "--exit-timeout-secs",
        30.0,
        seconds(0),
        "SECONDS",
        "seconds for which open streams may go on after SIGTERM or Ctrl-C; then each ends with an error event. A "
        "second signal ends at once. Keep it below what your supervisor waits before it kills",
    )
    heartbeat_timeout_s: float = option(
        "--engine-heartbeat-timeout-secs",
        10.0,
        seconds(1),
        "SECONDS",
        "an engine without a heartbeat for this long is killed and replaced. It sends one twice a second when idle "
        "and after every step, so this must exceed the longest step",
    )


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """All options of `sluice serve`. Each field is a group; its docstring is the group's title in --help."""

    model: ModelOptions = field(default_factory=ModelOptions)
    repository: RepositoryOptions = field(default_factory=RepositoryOptions)
    instances: InstanceOptions = field(default_factory=InstanceOptions)
    rag: RagOptions = field(default_factory=RagOptions)
    routes: RouteOptions = field(default_factory=RouteOptions)
    batches: BatchOptions = field(default_factory=BatchOptions)
    response_cache: ResponseCacheOptions = field(default_factory=ResponseCacheOptions)
    scheduling: SchedulingOptions = field(default_factory=SchedulingOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    tensorrt_llm: TensorRtLlmOptions = field(default_factory=TensorRtLlmOptions)
    fleet: FleetOptions = field(default_factory=FleetOptions)
    requests: RequestOptions = field(default_factory=RequestOptions)
    http: HttpOptions = field(default_factory=HttpOptions)
    responses: ResponsesOptions = field(default_factory=ResponsesOptions)
    streams: ResumeOptions = field(default_factory=ResumeOptions)
    grpc: GrpcOptions = field(default_factory=GrpcOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    access: AccessOptions = field(default_factory=AccessOptions)
    quotas: QuotaOptions = field(default_factory=QuotaOptions)
    ledger: LedgerOptions = field(default_factory=LedgerOptions)
    shutdown: ShutdownOptions = field(default_factory=ShutdownOptions)
    logging: LoggingOptions = field(default_factory=LoggingOptions)
    trace: TraceOptions = field(default_factory=TraceOptions)
    tracing: TracingOptions = field(default_factory=TracingOptions)

    def __post_init__(self) -> None:
        """Check options against each other. Raises OptionError."""
        tokens = self.scheduling.max_num_batched_tokens
        seqs = self.scheduling.max_num_seqs or BUNDLED.default_step_sizes.max_num_seqs
        if tokens is not None and tokens < seqs:
            raise OptionError(
                f"--max-num-batched-tokens must be at least --max-num-seqs ({seqs}), so that every running request "
                f"gets its token in each step, got {tokens}"
            )
        if self.http.port == self.metrics.port != 0:
            raise OptionError(f"--metrics-port must differ from --http-port, got {self.metrics.port} for both")
        self._check_repository()
        self._check_cache()
        self._check_speculation()
        self._check_timeouts()

    def _check_repository(self) -> None:
        repository = self.repository
        if repository.load and repository.control_mode is not ControlMode.EXPLICIT:
            raise OptionError(
                "--load-model needs --model-control-mode explicit; in the other modes nobody would ask it"
            )
        if repository.control_mode is not ControlMode.NONE and not repository.paths:
            raise OptionError(f"--model-control-mode {repository.control_mode} needs --model-repository")
        if self.model.served_model_name and repository.paths and self.model.path is None:
            raise OptionError("--served-model-name names MODEL; a repository's models have the names of their folders")
        model_flags: dict[str, object] = {
            "--tokenizer": self.model.tokenizer_path,
            "--lora-modules": self.tensorrt_llm.lora_modules,
            "--replicas": self.fleet.num_replicas > 1,
            "--prefill-replicas": self.fleet.num_prefill_replicas,
            "--engines": self.fleet.engines,
        }
        flags_set = [flag for flag, value in model_flags.items() if value]
        if flags_set and repository.paths and self.model.path is None:
            raise OptionError(
                f"{flags_set[0]} belongs to MODEL; a repository's models have theirs in their config.pbtxt"
            )

    def _check_cache(self) -> None:
        sizes = ("kv_cache_memory_bytes", "kv_cache_memory_fraction", "num_blocks")
        flags = {name: declared.flag for name, _, declared in list_options(CacheOptions)}
        flags_set = [flags[name] for name in sizes if getattr(self.cache, name) is not None]
        if len(flags_set) > 1:
            raise OptionError(f"{flags_set[0]} and {flags_set[1]} are two sizes for one KV cache; give one of them")
        tier = next((name for name in ("kv_host_cache_bytes", "kv_disk_cache") if getattr(self.cache, name)), None)
        if tier is not None and not self.cache.enable_prefix_caching:
            raise OptionError(
                f"{flags[tier]} keeps blocks of the prefix cache, which --no-enable-prefix-caching turns off"
            )

        if self.fleet.num_prefill_replicas and not self.cache.enable_prefix_caching:
            raise OptionError(
                "--prefill-replicas hand over blocks of the prefix cache, which --no-enable-prefix-caching turns off"
            )

    def _check_speculation(self) -> None:
        has_draft_model = self.speculation.speculation is Speculation.DRAFT_MODEL
        path = self.speculation.draft_model_path
        if has_draft_model and path is None:
            raise OptionError("--speculation draft_model needs --draft-model, the checkpoint to draft with")
        if path is not None and not has_draft_model:
            raise OptionError("--draft-model needs --speculation draft_model; without it nothing would use that model")

    def _check_timeouts(self) -> None:
        whole, queue = self.requests.timeout_s, self.requests.queue_timeout_s
        if whole is not None and queue is not None and queue > whole:
            raise OptionError(
                f"--queue-timeout-secs must be at most --request-timeout-secs ({whole:g}), which counts the wait too, "
                f"got {queue:g}"
            )

    def state_folder(self) -> Path:
        """Return the folder of uploaded files and of batches."""
        path = self.batches.state_path
        return Path(path) if path is not None else self.rag.data_folder() / "state"

    def request_limits(self) -> "RequestLimits":
        """Return the time limits of requests that name none."""
        from sluice.pipelines.llm.services import (
            RequestLimits,  # slow to import, and the engine starts before it is wanted
        )

        return RequestLimits(self.requests.timeout_s, self.requests.queue_timeout_s)

    def chat_settings(self) -> "ChatSettings":
        """Return how models take conversations."""
        from sluice.pipelines.llm.services import ChatSettings

        requests = self.requests
        return ChatSettings(
            requests.allows_special_tokens,
            requests.tool_call_parser,
            requests.reasoning_parser,
            requests.media_domains,
        )

    def engine(self, model_path: str, runtime: Runtime | None = None) -> EngineConfig:
        """Return the engine's configuration. `runtime` is the model's own choice, over that of the command line."""
        parts = (self.scheduling, self.cache, self.speculation)
        fields = {name: getattr(part, name) for part in parts for name, _, _ in list_options(type(part))}
        sizes = {name: fields.pop(name) for name in STEP_SIZES}
        model = self.model
        engine = EngineConfig(
            model_path=model_path,
            dtype=model.dtype,
            quantization=model.quantization,
            cache_path=model.cache_path,
            runtime=runtime or model.runtime,
            device=model.device,
            task=model.task,
            tokenizer_path=model.tokenizer_path,
            enable_lora=self.requests.allows_lora_updates,
            enable_sleep_mode=self.requests.allows_sleep,
            **{name: value for name, value in fields.items() if value is not None},
            **self.tensorrt_llm.engine_fields(),
        )
        chosen = choose_step_sizes(engine, sizes)
        set_here = {name: size for name, size in chosen.items() if sizes[name] or not self.tensorrt_llm.sets(name)}
        by_load = chooses_chunk(engine, sizes["max_num_batched_tokens"])
        return msgspec.structs.replace(engine, **set_here, chooses_chunk=by_load)


GROUPS = {each.name: cast(type[Any], each.default_factory) for each in fields(ServeConfig)}
"""The groups by their fields of ServeConfig."""
ParsedFlags = Mapping[str, str | bool | list[str]]
"""Values by flag: the text; the texts of a flag that may come several times; a boolean for a switch."""


def read_config(flags: ParsedFlags, environ: Mapping[str, str] | None = None) -> ServeConfig:
    """Read the configuration from flags and environment.

    Raises OptionError for the first option with a value that is not allowed.
    """
    return ServeConfig(**{name: read_group(group, flags, environ) for name, group in GROUPS.items()})


def read_client_options(flags: ParsedFlags, environ: Mapping[str, str] | None = None) -> RagClientOptions:
    """Read the options of `sluice rag` from flags and environment. Raises OptionError like `read_config`."""
    return read_group(RagClientOptions, flags, environ)


def read_group(group: type[GroupT], flags: ParsedFlags, environ: Mapping[str, str] | None = None) -> GroupT:
    """Read one group of options from flags and environment. Raises OptionError."""
    if environ is None:
        environ = os.environ  # noqa: TID251 - here the environment enters
    values: dict[str, Any] = {}
    for name, _, declared in list_options(group):
        value = flags.get(declared.flag)
        if isinstance(value, list):
            values[name] = declared.read_many(value, declared.flag)
        elif isinstance(value, str):
            values[name] = declared.read(value, declared.flag)
        elif value is not None:
            values[name] = value
        elif declared.variable in environ:
            values[name] = _from_variable(declared, environ[declared.variable])
    return group(**values)


def _from_variable(declared: Option, text: str) -> Any:
    if not declared.is_many:
        return declared.read(text, declared.variable)
    return declared.read_many((part.strip() for part in text.split(declared.separator)), declared.variable)


def find_unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return variables that look like ours and are not: most likely typing errors."""
    if environ is None:
        environ = os.environ  # noqa: TID251 - as above
    groups = (*GROUPS.values(), RagClientOptions, EngineServerOptions)
    known = {declared.variable for group in groups for _, _, declared in list_options(group)}
    return sorted(name for name in environ if name.startswith("SLUICE_") and name not in known)


def list_options(group: type[Any]) -> list[tuple[str, Any, Option]]:
    """Return (field, default, option) of every option in `group`."""
    return [(declared.name, declared.default, declared_option(declared)) for declared in fields(group)]
