"""The configuration of a load run: one frozen tree, made by the command line or by a benchmark, passed in parts."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self


class LoadConfigError(ValueError):
    """A setting that cannot be used. The message is for the user."""


class ApiKind(StrEnum):
    """The APIs that a run can call."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    OLLAMA_CHAT = "ollama_chat"
    GENERATE_STREAM = "generate_stream"
    GENERATE = "generate"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    INFER = "infer"
    INFER_BINARY = "infer_binary"
    GRPC_INFER = "grpc_infer"
    GRPC_STREAM = "grpc_stream"


class Arrival(StrEnum):
    """The distribution of the gaps between the requests of an open loop."""

    POISSON = "poisson"
    CONSTANT = "constant"
    GAMMA = "gamma"
    """Gaps of a gamma distribution, whose shape is `burstiness`: below 1 requests come in bursts."""


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Numbers of tokens to draw from uniformly: low..high, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise LoadConfigError(f"token range {self.low}..{self.high}: must satisfy 1 <= low <= high")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `128` or `32..256`. Raises LoadConfigError."""
        low, dots, high = text.partition("..")
        try:
            return cls(int(low), int(high) if dots else int(low))
        except LoadConfigError:
            raise
        except ValueError:
            raise LoadConfigError(f"{text!r}: write a number of tokens (128) or a range (32..256)") from None

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The server, and how to call it."""

    url: str
    api: ApiKind = ApiKind.COMPLETIONS
    model: str | None = None
    """None for the first model of the server's /v1/models."""
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 300.0
    """Most seconds of one request, from its first byte sent to its last byte received."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The content of the requests. The same seed gives the same prompts and lengths, in the same order."""

    prompt_tokens: TokenRange = TokenRange(128, 128)
    output_tokens: TokenRange = TokenRange(128, 128)
    seed: int = 0
    vocab_size: int = 4096
    """Token ids of prompts are drawn below this number."""
    tokenizer: Path | None = None
    """A tokenizer.json, with which the lengths of text prompts are exact."""
    ignore_eos: bool = True
    """Whether the model must generate the whole output length. Otherwise the length is only an upper bound."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Fields added to the JSON of every request. They replace the generator's own."""
    prefix_tokens: int = 0
    """Tokens at the start of each prompt that it shares with others; part of `prompt_tokens`."""
    num_prefixes: int = 1
    """Number of different shared starts. Each request draws one."""
    cancelled_share: float = 0.0
    """Part of the requests, from 0 to 1, whose client leaves at a random token of the answer."""
    trace: Path | None = None
    """A file of recorded requests, whose lengths and shared starts replace those above."""
    batch_size: int = 1
    """First dimension of the tensors of a v2 model, where that varies."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the inputs of a v2 model, by name, for dimensions that vary."""

    def __post_init__(self) -> None:
        if self.prefix_tokens >= self.prompt_tokens.low:
            raise LoadConfigError(
                f"prefix of {self.prefix_tokens} tokens: must be below the shortest prompt ({self.prompt_tokens.low})"
            )


@dataclass(frozen=True, slots=True)
class RequestPace:
    """When requests are sent.

    A closed loop keeps `concurrency` requests in flight. An open loop sends `request_rate` requests a second whatever
    the server does, with at most `concurrency` in flight where that is given too. A replay is an open loop at the times
    of the workload's trace.
    """

    concurrency: int | None = None
    request_rate: float | None = None
    arrival: Arrival = Arrival.POISSON
    burstiness: float = 1.0
    """Shape of gamma gaps: 1 is Poisson, less is burstier, more is steadier."""
    final_rate: float | None = None
    """Requests a second at the end of a run whose rate rises or falls evenly from `request_rate`. Needs a duration."""
    replay_speed: float | None = None
    """How many times as fast a trace is sent as it was recorded; None for no replay."""
    num_requests: int | None = None
    duration_s: float | None = None
    """No request starts later than this; the run waits for those in flight."""
    warmup: int = 0
    """Number of requests that are completed before the run and not counted."""

    def __post_init__(self) -> None:
        if self.concurrency is None and self.request_rate is None and self.replay_speed is None:
            raise LoadConfigError("a run needs concurrency (closed loop) or request_rate (open loop)")
        if self.replay_speed is not None and self.request_rate is not None:
            raise LoadConfigError("a run has a request_rate or the times of a trace, not both")
        if self.num_requests is None and self.duration_s is None and self.replay_speed is None:
            raise LoadConfigError("a run needs an end: num_requests or duration_s")
        if self.final_rate is not None and (self.request_rate is None or self.duration_s is None):
            raise LoadConfigError("a ramp needs request_rate, where it begins, and duration_s, how long it takes")


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in milliseconds. A request counts towards goodput where it meets all of them."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    """Target of the 99th percentile of the request's own gaps."""
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `ttft=200,itl=50`, in milliseconds. Raises LoadConfigError."""
        targets: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                targets[f"{name.strip()}_ms"] = float(value)
            except ValueError:
                raise LoadConfigError(f"{part!r}: write a target as name=milliseconds, e.g. ttft=200") from None
        try:
            return cls(**targets)
        except TypeError:
            raise LoadConfigError(f"{text!r}: targets are ttft, itl, tpot and e2e") from None


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """The configuration of one run."""

    target: LoadTarget
    pace: RequestPace
    workload: Workload = Workload()
    slo: Slo | None = None
