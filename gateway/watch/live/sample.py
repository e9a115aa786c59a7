"""The sample that `/v1/admin/live` sends: its schema, which docs/live.md explains to those who read it.

Fields may be added within a version; one that changes its meaning or goes takes another. None is what nobody knows.
"""

import msgspec

from sluice.gateway.plane.live_requests import LiveRequest
from sluice.gateway.watch.logs.ring import LogLine
from sluice.pipelines.text.sessions import SessionRow

VERSION = 1


class ServerPart(msgspec.Struct, frozen=True):
    """The server as a whole."""

    version: str
    pid: int
    started_at: float
    uptime_s: float
    state: str
    """`loading`, `ready`, `unready` or `draining`."""
    reason: str
    num_workers: int


class ThroughputPart(msgspec.Struct, frozen=True):
    """The work of all engines and models together, in a second."""

    prompt_tokens_per_s: float
    cached_tokens_per_s: float
    generated_tokens_per_s: float
    requests_per_s: float
    errors_per_s: float
    open_streams: int
    running: int
    waiting: int


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of `count` values in milliseconds."""

    p50: float | None
    p90: float | None
    p99: float | None
    count: int


class LatencyPart(msgspec.Struct, frozen=True):
    """Latencies of clients over the last minute, or since the watch began."""

    window_s: float
    ttft_ms: Percentiles
    itl_ms: Percentiles
    queue_ms: Percentiles


class BlocksPart(msgspec.Struct, frozen=True):
    """The KV blocks of an engine. `cached` ones are among the `free`, `shared` ones among the `used`."""

    size: int
    total: int
    reserved: int
    used: int
    shared: int | None
    cached: int
    free: int


HolderRow = tuple[str, int, int]
"""A sequence's request id, its blocks, and the most that it may need."""


class BlockMapPart(msgspec.Struct, frozen=True):
    """The states and the owners of the blocks: `cells` and `owners` are base64 of a byte a cell."""

    cells: str
    num_cells: int
    blocks_per_cell: int
    owners: str
    holders: list[HolderRow]


StepRow = tuple[float, float, int, int, int]
"""End in seconds since 1970, milliseconds, prefill tokens, sequences that decoded, sequences."""


class EnginePart(msgspec.Struct, frozen=True):
    """An engine: a replica of a version of a language model."""

    model: str
    version: str
    replica: str
    runtime: str
    policy: str
    state: str
    """`loading`, `serving`, `restarting`, `sleeping`, `silent`, `draining` or `failed`."""
    reason: str
    pids: tuple[int, ...]
    heartbeat_age_s: float
    num_restarts: int
    running: int
    waiting: int
    max_num_seqs: int
    predicted_wait_s: float
    prompt_tokens_per_s: float
    cached_tokens_per_s: float
    generated_tokens_per_s: float
    steps_per_s: float
    busy: float
    """The share of the time that it was in steps, from 0 to 1."""
    blocks: BlocksPart
    block_map: BlockMapPart | None
    steps: list[StepRow] | None
    steps_left_out: int


class SequencesPart(msgspec.Struct, frozen=True):
    """The open generations; `items` are those that run, the oldest first, and then those that wait."""

    total: int
    items: list[LiveRequest]


class VersionPart(msgspec.Struct, frozen=True):
    """A version of a model. `weight` is its share of the requests that name no version; None without weights."""

    version: str
    state: str
    reason: str
    weight: float | None
    in_flight: int


class ModelPart(msgspec.Struct, frozen=True):
    """A model of the repository. `state` is the best of its versions', "" for one that was never loaded."""

    name: str
    state: str
    is_llm: bool
    versions: list[VersionPart]


class QuotaPart(msgspec.Struct, frozen=True):
    """The usage of a limit, the reservations of open requests included. Money is in its unit."""

    limit: str
    used: float
    most: float
    ratio: float


class TenantPart(msgspec.Struct, frozen=True):
    """A tenant with open requests, tokens or limits."""

    name: str
    running: int
    waiting: int
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    quotas: list[QuotaPart]


class KeyPart(msgspec.Struct, frozen=True):
    """A key with limits that was used."""

    name: str
    quotas: list[QuotaPart]


class ReplicaPart(msgspec.Struct, frozen=True):
    """A replica of a model with several, as the router sees it."""

    model: str
    name: str
    state: str
    is_leaving: bool
    version: str
    weight: float
    num_routed: int
    num_adopted: int


class AlertPart(msgspec.Struct, frozen=True):
    """A fault or a bound of the server, in the words of `sluice doctor --live`."""

    level: str
    kind: str
    subject: str
    text: str
    remedy: str


class LiveSample(msgspec.Struct, frozen=True, kw_only=True):
    """The server at one time. Rates are over the `elapsed_s` since the sample before."""

    version: int = VERSION
    time: float
    interval_s: float
    elapsed_s: float
    server: ServerPart
    throughput: ThroughputPart
    latency: LatencyPart
    engines: list[EnginePart]
    sequences: SequencesPart
    models: list[ModelPart]
    tenants: list[TenantPart]
    keys: list[KeyPart]
    sessions: list[SessionRow]
    """The latest ones first."""
    replicas: list[ReplicaPart]
    alerts: list[AlertPart]
    warnings: list[LogLine]
