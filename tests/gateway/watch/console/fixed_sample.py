"""Samples of a server that does not change, so that pages which show them always look the same."""

from base64 import b64encode
from itertools import zip_longest

from sluice.engine.frames import RESERVED
from sluice.engine.kv_cache import BlockState
from sluice.gateway.plane.live_requests import LiveRequest
from sluice.gateway.watch.live.sample import (
    AlertPart,
    BlockMapPart,
    BlocksPart,
    EnginePart,
    HolderRow,
    LatencyPart,
    LiveSample,
    ModelPart,
    Percentiles,
    QuotaPart,
    SequencesPart,
    ServerPart,
    TenantPart,
    ThroughputPart,
    VersionPart,
)
from sluice.gateway.watch.logs.ring import LogLine
from sluice.pipelines.text.sessions import SessionRow

NOW = 1_767_225_600.0
"""The first second of 2026, UTC."""
NUM_SAMPLES = 90
NUM_BLOCKS = 512
_HOLDERS: list[HolderRow] = [(f"chatcmpl-{name}{name}{name}", 24 + 7 * n, 96) for n, name in enumerate("0a1b2c3d")]


def fixed_samples() -> list[LiveSample]:
    """Return the samples of a minute and a half, one a second."""
    return [_sample(NOW - NUM_SAMPLES + number, number) for number in range(1, NUM_SAMPLES + 1)]


def _sample(now: float, number: int) -> LiveSample:
    wave = number % 30
    return LiveSample(
        time=now,
        interval_s=1.0,
        elapsed_s=1.0,
        server=ServerPart("1.0.0", 4711, NOW - 86_400, 86_400.0, "ready", "", 2),
        throughput=ThroughputPart(400.0 + 12 * wave, 120.0, 900.0 + 9 * wave, 6.5, 0.0, 8, 8, 2),
        latency=LatencyPart(
            60.0,
            ttft_ms=Percentiles(42.0 + wave, 71.0, 96.5 + wave, 400),
            itl_ms=Percentiles(8.2, 9.9, 14.1, 9000),
            queue_ms=Percentiles(1.1, 3.0, 12.0, 400),
        ),
        engines=[_engine(now)],
        sequences=SequencesPart(10, _sequences()),
        models=[ModelPart("rill", "READY", True, [VersionPart("1", "READY", "", None, 10)])],
        tenants=[TenantPart("acme", 6, 2, 410.0, 700.0, [QuotaPart("tokens_per_min", 61_000.0, 90_000.0, 0.678)])],
        keys=[],
        sessions=[
            SessionRow("1f0c7a/explore", "1f0c7a", "acme", "rill", 3, 9000, 6100, 420, 96, "tools[2] changed", 2.0),
            SessionRow("1f0c7a", "", "acme", "rill", 12, 96_000, 91_000, 5200, 0, "", 14.5),
        ],
        replicas=[],
        alerts=[AlertPart("warn", "queue", "rill", "2 requests wait for a place", "raise --max-num-seqs")],
        warnings=[
            LogLine(
                NOW - 30, "WARNING", "sluice.engine.kv_tiers.disk", "-", "the KV tier on disk is off", "engine-4712"
            ),
            LogLine(NOW - 20, "ERROR", "sluice.gateway.http.errors", "chatcmpl-000", "the request failed", "worker-1"),
        ],
    )


def _engine(now: float) -> EnginePart:
    used = sum(num for _, num, _ in _HOLDERS)
    return EnginePart(
        model="rill",
        version="1",
        replica="",
        runtime="openvino",
        policy="guaranteed_no_evict",
        state="serving",
        reason="",
        pids=(4712,),
        heartbeat_age_s=0.01,
        num_restarts=0,
        running=8,
        waiting=2,
        max_num_seqs=8,
        predicted_wait_s=0.4,
        prompt_tokens_per_s=520.0,
        cached_tokens_per_s=120.0,
        generated_tokens_per_s=980.0,
        steps_per_s=122.0,
        busy=0.93,
        blocks=BlocksPart(16, NUM_BLOCKS, used + 40, used, 16, 60, NUM_BLOCKS - used),
        block_map=_block_map(used),
        steps=[(now - 0.01 * n, 8.0 + n % 5, 64 if n % 9 == 0 else 0, 8, 8) for n in range(4, 0, -1)],
        steps_left_out=118,
    )


def _block_map(used: int) -> BlockMapPart:
    """Return a map with the sequences' blocks in turns, 16 of them shared, then 40 reserved ones; at the end 60 cached
    ones."""
    turns = zip_longest(*([n] * num for n, (_, num, _) in enumerate(_HOLDERS, 1)), fillvalue=0)
    owners = [n for turn in turns for n in turn if n]
    states = [BlockState.SHARED if n < 16 else BlockState.OWNED for n in range(used)]
    free = NUM_BLOCKS - used
    cells = bytes([*states, *[BlockState.FREE] * (free - 60), *[BlockState.CACHED] * 60])
    drawn = bytes([*owners, *[RESERVED] * 40, *[0] * (free - 40)])
    return BlockMapPart(b64encode(cells).decode(), NUM_BLOCKS, 1, b64encode(drawn).decode(), _HOLDERS)


def _sequences() -> list[LiveRequest]:
    running = [_request(id_, "running", 60 + 40 * n) for n, (id_, _, _) in enumerate(_HOLDERS)]
    return [*running, _request("chatcmpl-waits1", "waiting", 0), _request("chatcmpl-waits2", "waiting", 0)]


def _request(request_id: str, state: str, num_generated: int) -> LiveRequest:
    return LiveRequest(
        id=f"gen-{request_id}",
        request_id=request_id,
        model="rill",
        version="1",
        adapter="",
        tenant="acme",
        priority=0,
        state=state,
        age_s=3.2,
        prompt_tokens=400,
        generated_tokens=num_generated,
        max_tokens=512,
        replica="",
        worker=1,
    )
