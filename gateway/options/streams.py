"""Options of streams that clients may come back to, and of requests that are answered once."""

from dataclasses import dataclass

from sluice.gateway.options.option import integer, option, seconds, size
from sluice.gateway.options.quotas import MEMORY, quota_store


@dataclass(frozen=True, slots=True)
class ResumeOptions:
    """Resumable streams and idempotency keys"""

    resume_s: float = option(
        "--stream-resume-secs",
        0.0,
        seconds(0),
        "SECONDS",
        "longest time that a stream which its client made resumable (x-sluice-resume: true) goes on without a reader, "
        "and that its events are kept after its end; 0: no stream is resumable, and a client that is gone frees its "
        "blocks at once",
    )
    idempotency_s: float = option(
        "--idempotency-secs",
        600.0,
        seconds(0),
        "SECONDS",
        "time for which the answer to a request with an Idempotency-Key is kept, and for which such a request goes "
        "on without its client; 0 ignores the header",
    )
    store: str = option(
        "--stream-store",
        MEMORY,
        quota_store,
        "memory|URL",
        "store of these: the memory of this server, or also a Redis (6.2 or later) that gateways share, so that each "
        "can go on with the streams of another",
        secret=True,
    )
    max_bytes: int = option(
        "--stream-store-bytes",
        64 << 20,
        size(1 << 20),
        "SIZE",
        "most bytes of kept events and answers together; past that the ones that ended first are dropped",
    )
    max_count: int = option(
        "--stream-store-count",
        20_000,
        integer(1),
        "COUNT",
        "most kept streams and answers; past that the ones that ended first are dropped, and where all are under way "
        "requests for another are refused (429)",
    )
    max_stream_bytes: int = option(
        "--stream-max-bytes",
        4 << 20,
        size(64 << 10),
        "SIZE",
        "most bytes of kept events of one stream; past that its first events are dropped, and a client that wants "
        "them gets an error",
    )

    @property
    def is_shared(self) -> bool:
        return self.store != MEMORY
