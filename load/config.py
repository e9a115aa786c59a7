"""The configuration of a load run: one frozen tree, made by the command line or by a benchmark, passed in parts."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Self


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
    RAG = "rag"
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
    unit: ClassVar[str] = "token"

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise LoadConfigError(f"{self.unit} range {self.low}..{self.high}: must satisfy 1 <= low <= high")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `128` or `32..256`. Raises LoadConfigError."""
        low, dots, high = text.partition("..")
        try:
            return cls(int(low), int(high) if dots else int(low))
        except LoadConfigError:
            raise
        except ValueError:
            raise LoadConfigError(f"{text!r}: write a number of {cls.unit}s (8) or a range (2..8)") from None

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


@dataclass(frozen=True, slots=True)
class TurnRange(TokenRange):
    """Numbers of turns to draw from uniformly, both ends included."""

    unit: ClassVar[str] = "turn"


@dataclass(frozen=True, slots=True)
class SecondsRange:
    """Seconds to draw from uniformly, both ends included."""

    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `2` or `0.5..3`. Raises LoadConfigError."""
        low, dots, high = text.partition("..")
        try:
            found = cls(float(low), float(high if dots else low))
        except ValueError:
            found = cls(-1.0, -1.0)
        if not 0.0 <= found.low <= found.high < float("inf"):
            raise LoadConfigError(f"{text!r}: write seconds (2) or a range of them (0.5..3)")
        return found


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of every request. `functions` are JSON objects with name, description and parameters."""

    functions: tuple[dict[str, Any], ...]
    choice: str = "auto"
    """auto, required, none, or the name of a tool that must be called."""

    def __post_init__(self) -> None:
        names = [each.get("name") for each in self.functions]
        if self.choice not in ("auto", "required", "none", *names):
            known = ", ".join(map(str, names))
            raise LoadConfigError(
                f"tool choice {self.choice!r}: write auto, required, none or the name of one: {known}"
            )

    @property
    def names_tool(self) -> bool:
        return self.choice not in ("auto", "required", "none")


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
    """The model must generate the whole output length. Where this is false, the length is only an upper bound."""
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
    turns: TokenRange = TurnRange(1, 1)
    """Turns of each session. Each later one carries the turns before it, with the server's answers."""
    think_s: SecondsRange = SecondsRange(0.0, 0.0)
    """Time from the end of an answer to the next turn of its session."""
    stores_turns: bool = True
    """Later turns of responses name the response before them, which the server keeps, instead of all turns."""
    num_images: int = 0
    """Images of each turn: PNGs of random blocks."""
    image_size: tuple[int, int] = (512, 512)
    """Width and height in pixels."""
    tool_use: ToolUse | None = None
    json_schema: dict[str, Any] | None = None
    """A JSON schema that every answer must meet."""
    collection: str = "sluice"
    """The collection of documents that questions are about."""

    def __post_init__(self) -> None:
        if self.prefix_tokens >= self.prompt_tokens.low:
            raise LoadConfigError(
                f"prefix of {self.prefix_tokens} tokens: must be below the shortest prompt ({self.prompt_tokens.low})"
            )


@dataclass(frozen=True, slots=True)
class RequestPace:
    """The times at which requests are sent.

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
    """The factor by which a trace is sent faster than it was recorded; None for no replay."""
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
    num_processes: int = 1
    """Processes of the client, each with a share of the requests."""
    metrics_url: str | None = None
    """The page of the server's metrics, or `auto`; None where none is read."""
    measures_energy: bool = False

    def __post_init__(self) -> None:
        concurrency = self.pace.concurrency
        if concurrency is not None and self.num_processes > concurrency:
            raise LoadConfigError(
                f"{self.num_processes} processes for a concurrency of {concurrency}: "
                "at most one for each request in flight"
            )
