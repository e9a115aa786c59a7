"""The front end beside vLLM's: both servers stay up, and take turns with the same load on the same bundled model.

First with engines that compute nothing, each front end on a core of its own; then with the real engines on all cores.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Figure, ReportProgress, Target
from benchmarks.offline.environments import VLLM, interpreter
from benchmarks.server import running_server
from benchmarks.streaming.client import Client, Load, chat_request
from benchmarks.streaming.engine import CORES_VARIABLE
from benchmarks.streaming.peers import IDLE_S, Peer, sluice, vllm
from benchmarks.streaming.streams import HEAVY, cores, gateway_alone, joined
from sluice.gateway.checkpoint import find_checkpoint, model_name

LIGHT = 3000.0
"""Tokens/s for which both front ends have time."""
RATIO_TARGET = Target(3.0, is_ceiling=False)


@dataclass(frozen=True, slots=True)
class Row:
    """Streams of `tokens` tokens each. `offered` tokens/s come from an engine that computes nothing; 0: it computes."""

    streams: int
    requests: int
    tokens: int
    offered: float = 0.0

    @property
    def name(self) -> str:
        engine = f"{self.offered:,.0f}/s offered" if self.offered else "computed"
        return f"{self.streams} streams, {engine}"


NULL_ROWS = (Row(64, 128, 128, LIGHT), Row(64, 512, 256, HEAVY), Row(512, 1024, 128, HEAVY))
REAL_ROWS = (Row(1, 6, 128), Row(32, 64, 128), Row(64, 192, 128))


def measure(num_repeats: int, folder: Path, report: ReportProgress) -> list[Figure]:
    """Measure all rows; Sluice and vLLM take turns in an order that changes with each repeat."""
    python = interpreter(VLLM, folder / "envs", report)
    client = Client.build(folder, cores()[1])
    log = folder / "streams.log"
    figures: list[Figure] = []
    for rows, ours in (
        (NULL_ROWS, lambda: gateway_alone(log, is_pinned=True)),
        (REAL_ROWS, lambda: running_server(find_checkpoint(None), log)),
    ):
        is_null = bool(rows[0].offered)
        report(f"starting vLLM, {'with an engine that computes nothing' if is_null else 'as it is'}; a minute or two")
        own, others = map(joined, cores())
        null = (f"{CORES_VARIABLE}={others}", "taskset", "-c", own) if is_null else ()
        options = ("--max-num-seqs", "1024", *(("--enforce-eager",) if is_null else ()))
        with vllm(python, folder, *options, variables=null) as theirs, sluice(ours) as mine:
            figures += _take_turns((mine, theirs), rows, client, num_repeats, report)
    return figures


def _take_turns(
    peers: tuple[Peer, Peer], rows: tuple[Row, ...], client: Client, num_repeats: int, report: ReportProgress
) -> Iterator[Figure]:
    samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for peer in peers:
        for row in rows:  # warm up: vLLM compiles for each new size of a batch
            client.run(peer.port, _request(row), streams=row.streams, requests=row.streams, tokens=row.tokens)
    for repeat in range(num_repeats):
        for row in rows:
            for peer in peers if repeat % 2 == 0 else peers[::-1]:
                time.sleep(IDLE_S)
                values = _measure_turn(peer, row, client)
                report(f"{peer.name}, {row.name}: " + ", ".join(f"{n} {v:.5g}" for n, (v, _) in values.items()))
                for name, (value, unit) in values.items():
                    samples[name, f"{peer.name}, {row.name}", unit].append(value)
    for (name, subject, unit), found in samples.items():
        yield Figure(name, subject, unit, tuple(found))
    for row in rows:
        ours, theirs = (samples["front end's CPU", f"{peer.name}, {row.name}", "us/token"] for peer in peers)
        ratios = tuple(theirs / ours for ours, theirs in zip(ours, theirs, strict=True))
        yield Figure("tokens/s per core of front end", row.name, "times vLLM's", ratios, RATIO_TARGET)


def _request(row: Row) -> bytes:
    return chat_request(model_name(find_checkpoint(None)), row.tokens, seed=int(row.offered), temperature=0.0)


def _measure_turn(peer: Peer, row: Row, client: Client) -> dict[str, tuple[float, str]]:
    before = peer.cpu_s()
    load: Load = client.run(peer.port, _request(row), streams=row.streams, requests=row.requests, tokens=row.tokens)
    front_s, all_s = (now - then for now, then in zip(peer.cpu_s(), before, strict=True))
    return {
        "output": (load.tokens_per_s, "tokens/s"),
        "events with text": (load.events * 1e6 / load.elapsed, "events/s"),
        "front end's CPU": (front_s * 1e6 / load.tokens, "us/token"),
        "front end's CPU an event": (front_s * 1e6 / load.events, "us/event"),
        "CPU of all processes": (all_s * 1e6 / load.tokens, "us/token"),
        "TTFT p50": (load.first_p50 / 1e3, "ms"),
        "ITL p50": (load.gap_p50 / 1e3, "ms"),
    }
