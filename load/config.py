"""What a load run is: one frozen tree, made by the command line or by a benchmark, passed in parts."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self


class ConfigError(ValueError):
    """A setting that cannot be run; the message is for the user."""


class Api(StrEnum):
    """Which protocol a run speaks."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    GENERATE_STREAM = "generate_stream"


class Arrival(StrEnum):
    """How an open loop spaces its requests."""

    POISSON = "poisson"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class TokenRange:
    """A number of tokens drawn uniformly from low..high, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ConfigError(f"token range {self.low}..{self.high}: must satisfy 1 <= low <= high")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `128` or `32..256`."""
        low, dots, high = text.partition("..")
        try:
            return cls(int(low), int(high) if dots else int(low))
        except ConfigError:
            raise
        except ValueError:
            raise ConfigError(f"{text!r}: write a number of tokens (128) or a range (32..256)") from None

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


@dataclass(frozen=True, slots=True)
class Target:
    """The server and how to talk to it."""

    url: str
    api: Api = Api.COMPLETIONS
    model: str | None = None
    """None asks the server's /v1/models and takes the first."""
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 300.0
    """Longest one request may take, from its first byte sent to its last byte received."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked. The same seed asks the same prompts and lengths, in the same order."""

    prompt_tokens: TokenRange = TokenRange(128, 128)
    output_tokens: TokenRange = TokenRange(128, 128)
    seed: int = 0
    vocab_size: int = 4096
    """Token ids of prompts are drawn below this."""
    tokenizer: Path | None = None
    """A tokenizer.json: makes the lengths of text prompts exact."""
    ignore_eos: bool = True
    """False lets the model stop by itself: output lengths become upper bounds and no stream is short."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Fields added to every request's JSON; they win over ours."""


@dataclass(frozen=True, slots=True)
class Pace:
    """When requests are sent. Closed loop: `concurrency` at a time. Open loop: `request_rate` a second, whatever
    the server does, with at most `concurrency` in flight where that is given too."""

    concurrency: int | None = None
    request_rate: float | None = None
    arrival: Arrival = Arrival.POISSON
    num_requests: int | None = None
    duration_s: float | None = None
    """No request starts later than this; those in flight are waited for."""
    warmup: int = 0
    """Requests sent and waited for before the run, not counted."""

    def __post_init__(self) -> None:
        if self.concurrency is None and self.request_rate is None:
            raise ConfigError("a run needs concurrency (closed loop) or request_rate (open loop)")
        if self.num_requests is None and self.duration_s is None:
            raise ConfigError("a run needs an end: num_requests or duration_s")


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in milliseconds that a request must meet, all of them, to count towards goodput."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    """Bounds the 99th percentile of the request's own gaps."""
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `ttft=200,itl=50`: milliseconds."""
        targets: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                targets[f"{name.strip()}_ms"] = float(value)
            except ValueError:
                raise ConfigError(f"{part!r}: write a target as name=milliseconds, e.g. ttft=200") from None
        try:
            return cls(**targets)
        except TypeError:
            raise ConfigError(f"{text!r}: targets are ttft, itl, tpot and e2e") from None


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """One run."""

    target: Target
    pace: Pace
    workload: Workload = Workload()
    slo: Slo | None = None
